// A decoder layer in one call: attention block and feed-forward block, each with a norm before it,
// behind it or both, and added to what came in. `engine/fused/layer.py` finds out which.
#pragma once

#include <ATen/ops/add.h>
#include <ATen/record_function.h>
#include <torch/custom_class.h>

#include <optional>
#include <utility>
#include <vector>

#include "gated_linear.h"
#include "linear.h"
#include "paged_attention.h"
#include "rms_norm.h"
#include "rotary.h"

namespace relevo {

// A part of the layer, for profilers: by the name that it has as an operation of its own.
template <typename function_t>
auto recorded(const char* name, function_t&& function) {
  RECORD_FUNCTION(name, c10::ArrayRef<const c10::IValue>{});
  return function();
}

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
  enum Product { kQueries, kKeys, kValues, kOutput, kGate, kUp, kDown, kProducts };
  using Weights = std::vector<at::Tensor>;
  using Optionals = c10::List<std::optional<at::Tensor>>;
  using Factors = std::vector<double>;

  DecoderLayer(
      const Optionals& norms, const Factors& epsilons, const Factors& offsets, Weights weights,
      const Optionals& biases, int64_t head_dim, int64_t activation, double residual_factor,
      int64_t index, double scaling, int64_t window, double softcap,
      std::optional<at::Tensor> sinks)
      : weights_(std::move(weights)),
        biases_(biases.vec()),
        head_dim_(head_dim),
        activation_(activation),
        residual_factor_(residual_factor),
        index_(index),
        scaling_(scaling),
        window_(window),
        softcap_(softcap),
        sinks_(std::move(sinks)) {
    TORCH_CHECK(norms.size() == kNorms && epsilons.size() == kNorms && offsets.size() == kNorms,
        "expected six norms or none each");
    TORCH_CHECK(weights_.size() == kProducts && biases_.size() == kProducts,
        "expected seven weights, with a bias or none each");
    for (int place = 0; place < kNorms; ++place)
      norms_.push_back({norms.get(place), epsilons[place], offsets[place]});
  }

  // From now on products are those of inputs in bfloat16, where this CPU has them.
  void round_inputs() { rounds_ = true; }

  // hidden [1, tokens, width], cosine and sine [1, tokens, rotary_dim] -> [1, tokens, width]
  at::Tensor forward(
      const at::Tensor& hidden, const at::Tensor& cosine, const at::Tensor& sine,
      const at::Tensor& cache, const at::Tensor& block_table, const at::Tensor& row_starts,
      const at::Tensor& context_lens) const {
    const auto [query, key, value] = heads_of(norms_[kBeforeAttention](hidden));
    recorded("relevo::rotary", [&] { rotary(query, key, cosine[0], sine[0]); });
    const at::Tensor attended = recorded("relevo::paged_attention", [&, &q = query, &k = key, &v = value] {
      return paged_attention(
          q, k, v, cache, index_, block_table, row_starts, context_lens, scaling_, window_,
          softcap_, sinks_);
    });
    const at::Tensor output = product(attended.view({1, hidden.size(1), -1}), kOutput);
    const at::Tensor middle = add(hidden, norms_[kBehindAttention](output));
    const at::Tensor gated = gate(norms_[kBeforeMlp](middle));
    return add(middle, norms_[kBehindMlp](product(gated, kDown)));
  }

 private:
  // Queries, keys and values, each [tokens, heads, head_dim].
  std::tuple<at::Tensor, at::Tensor, at::Tensor> heads_of(const at::Tensor& hidden) const {
    const Biases biases({biases_[kQueries], biases_[kKeys], biases_[kValues]});
    auto products = recorded("relevo::linears", [&] {
      return linears(hidden, {weights_[kQueries], weights_[kKeys], weights_[kValues]}, biases, rounds_);
    });
    for (at::Tensor& each : products) each = each.view({hidden.size(1), -1, head_dim_});
    return {norms_[kQuery](products[0]), norms_[kKey](products[1]), products[2]};
  }

  at::Tensor gate(const at::Tensor& hidden) const {
    return recorded("relevo::gated_linear", [&] {
      return gated_linear(
          hidden, weights_[kGate], weights_[kUp], biases_[kGate], biases_[kUp], activation_,
          rounds_);
    });
  }

  at::Tensor product(const at::Tensor& input, Product which) const {
    return recorded("relevo::widening_linear", [&] {
      return project(input, weights_[which], biases_[which], rounds_);
    });
  }

  at::Tensor add(const at::Tensor& hidden, at::Tensor change) const {
    if (residual_factor_ == 1) return change.add_(hidden);  // nobody else has it
    return at::add(hidden, change, residual_factor_);
  }

  std::vector<Norm> norms_;
  Weights weights_;
  std::vector<std::optional<at::Tensor>> biases_;
  int64_t head_dim_, activation_;
  double residual_factor_;
  int64_t index_;
  double scaling_;
  int64_t window_;
  double softcap_;
  std::optional<at::Tensor> sinks_;
  bool rounds_ = false;
};

}  // namespace relevo
