// A decoder layer in one call: attention block and feed-forward block, each with a norm before it,
// behind it or both, and added to what came in. `engine/fused/layer.py` finds out which.
#pragma once

#include <ATen/ops/add.h>
#include <torch/custom_class.h>

#include <optional>
#include <utility>
#include <vector>

#include "layer_products.h"
#include "layer_tiles.h"
#include "paged_attention.h"
#include "rms_norm.h"
#include "rotary.h"

namespace relevo {

struct Norm {
  std::optional<at::Tensor> weight;  // none: nothing is done
  double epsilon, offset;

  at::Tensor operator()(const at::Tensor& input) const {
    if (!weight) return input;
    return recorded("relevo::rms_norm", [&] { return rms_norm(input, *weight, epsilon, offset); });
  }
};

class DecoderLayer : public torch::CustomClassHolder {
 public:
  enum NormPlace { kBeforeAttention, kQuery, kKey, kBehindAttention, kBeforeMlp, kBehindMlp, kNorms };
  using Weights = std::vector<at::Tensor>;
  using Optionals = c10::List<std::optional<at::Tensor>>;
  using Factors = std::vector<double>;

  DecoderLayer(
      const Optionals& norms, const Factors& epsilons, const Factors& offsets, Weights weights,
      const Optionals& biases, int64_t head_dim, int64_t activation, double residual_factor,
      int64_t index, double scaling, int64_t window, double softcap,
      std::optional<at::Tensor> sinks)
      : weights_{std::move(weights), biases.vec(), activation},
        head_dim_(head_dim),
        residual_factor_(residual_factor),
        index_(index),
        scaling_(scaling),
        window_(window),
        softcap_(softcap),
        sinks_(std::move(sinks)) {
    TORCH_CHECK(norms.size() == kNorms && epsilons.size() == kNorms && offsets.size() == kNorms,
        "expected six norms or none each");
    constexpr size_t kProducts = LayerWeights::kProducts;
    TORCH_CHECK(weights_.weights.size() == kProducts && weights_.biases.size() == kProducts,
        "expected seven weights, with a bias or none each");
    for (int place = 0; place < kNorms; ++place)
      norms_.push_back({norms.get(place), epsilons[place], offsets[place]});
  }

  // From now on products are those of inputs in bfloat16, where this CPU has them.
  void round_inputs() { weights_.rounds = true; }

  // hidden [1, tokens, width], cosine and sine [1, tokens, rotary_dim] -> [1, tokens, width]
  at::Tensor forward(
      const at::Tensor& hidden, const at::Tensor& cosine, const at::Tensor& sine,
      const at::Tensor& cache, const at::Tensor& block_table, const at::Tensor& row_starts,
      const at::Tensor& context_lens) const {
    const auto attend = [&](const Heads& heads) {
      return recorded("relevo::paged_attention", [&] {
        const at::Tensor attended = paged_attention(
            heads.query, heads.key, heads.value, cache, index_, block_table, row_starts,
            context_lens, scaling_, window_, softcap_, sinks_);
        return attended.view({1, hidden.size(1), -1});
      });
    };
#ifdef __AMX_BF16__
    if (LayerTiles::suit(weights_, hidden)) return forward_in_turns(hidden, cosine, sine, attend);
#endif
    const LayerProducts products(weights_);
    const at::Tensor attended = attend(heads_of(products, hidden, cosine[0], sine[0]));
    return behind_attention(products, hidden, attended);
  }

 private:
  struct Heads {
    at::Tensor query, key, value;  // each [tokens, heads, head_dim]
  };

#ifdef __AMX_BF16__
  // The same for many tokens: what each token goes through alone, some tokens at a time.
  template <typename attend_t>
  at::Tensor forward_in_turns(
      const at::Tensor& hidden, const at::Tensor& cosine, const at::Tensor& sine,
      attend_t&& attend) const {
    thread_local LayerTiles kept;  // fresh pages cost as much as filling them
    LayerTiles& tiles = kept;      // this thread's, in all threads
    tiles.take(weights_);
    const int64_t num_tokens = hidden.size(1);
    const auto place = [&](LayerWeights::Product which) {
      return at::empty({1, num_tokens, weights_.weights[which].size(0)}, hidden.options());
    };
    const TurnProducts::Places all{
        place(LayerWeights::kQueries), place(LayerWeights::kKeys), place(LayerWeights::kValues),
        place(LayerWeights::kDown)};
    tiles.for_tokens(num_tokens, [&](int64_t first, int64_t count) {
      const TurnProducts::Places some = all.of(first, count);
      const Heads heads = heads_of(
          TurnProducts(tiles, some), hidden.narrow(1, first, count),
          cosine[0].narrow(0, first, count), sine[0].narrow(0, first, count));
      put(heads.query, some.query);
      put(heads.key, some.key);
    });
    const at::Tensor attended = attend({in_heads(all.query), in_heads(all.key), in_heads(all.value)});
    tiles.for_tokens(num_tokens, [&](int64_t first, int64_t count) {
      const TurnProducts::Places some = all.of(first, count);
      const at::Tensor output = behind_attention(
          TurnProducts(tiles, some), hidden.narrow(1, first, count),
          attended.narrow(1, first, count));
      put(output, some.output);
    });
    return all.output;
  }

  // A norm has made another tensor of what lay in its place.
  static void put(const at::Tensor& numbers, const at::Tensor& place) {
    if (!numbers.is_alias_of(place)) place.copy_(numbers.view_as(place));
  }
#endif

  // [1, tokens, outputs] -> [tokens, heads, head_dim]
  at::Tensor in_heads(const at::Tensor& outputs) const {
    return outputs.view({outputs.size(1), -1, head_dim_});
  }

  // cosine, sine [tokens, rotary_dim]
  template <typename products_t>
  Heads heads_of(
      const products_t& products, const at::Tensor& hidden, const at::Tensor& cosine,
      const at::Tensor& sine) const {
    const auto outputs = products.heads(norms_[kBeforeAttention](hidden));
    const Heads heads{
        norms_[kQuery](in_heads(outputs[0])), norms_[kKey](in_heads(outputs[1])),
        in_heads(outputs[2])};
    recorded("relevo::rotary", [&] { rotary(heads.query, heads.key, cosine, sine); });
    return heads;
  }

  template <typename products_t>
  at::Tensor behind_attention(
      const products_t& products, const at::Tensor& hidden, const at::Tensor& attended) const {
    const at::Tensor output = products.output(attended);
    const at::Tensor middle = add(hidden, norms_[kBehindAttention](output));
    const at::Tensor change = products.feed_forward(norms_[kBeforeMlp](middle));
    return add(middle, norms_[kBehindMlp](change));
  }

  at::Tensor add(const at::Tensor& hidden, at::Tensor change) const {
    if (residual_factor_ == 1) return change.add_(hidden);  // nobody else has it
    return at::add(hidden, change, residual_factor_);
  }

  std::vector<Norm> norms_;
  LayerWeights weights_;
  int64_t head_dim_;
  double residual_factor_;
  int64_t index_;
  double scaling_;
  int64_t window_;
  double softcap_;
  std::optional<at::Tensor> sinks_;
};

}  // namespace relevo
