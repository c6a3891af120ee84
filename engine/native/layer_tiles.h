// The products of a decoder layer: of many tokens with weights that were turned into tiles.
//
// Each thread takes some tokens at a time through all of them, so that what lies between two products
// stays in its core's cache. Every result is that of `layer_products.h`, to the last bit.
#pragma once

#include <ATen/ops/empty_like.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "layer_products.h"
#include "token_tiles.h"

namespace relevo {

constexpr int64_t kManyTokens = 192;  // from here on it pays to turn the weights

#ifdef __AMX_BF16__

// Outputs of a token: the last ones may be fewer than kTileSide.
class OutputRow {
 public:
  OutputRow(const std::optional<at::Tensor>& bias, int64_t num_outputs)
      : bias_(bias ? bias->const_data_ptr<float>() : nullptr), num_outputs_(num_outputs) {}

  __m512 with_bias(__m512 sums, int64_t first) const {
    return bias_ ? _mm512_add_ps(sums, _mm512_maskz_loadu_ps(mask(first), bias_ + first)) : sums;
  }
  void store(float* row, int64_t first, __m512 sums) const {
    _mm512_mask_storeu_ps(row + first, mask(first), with_bias(sums, first));
  }

 private:
  __mmask16 mask(int64_t first) const { return first_of_16(num_outputs_ - first); }

  const float* bias_;
  int64_t num_outputs_;
};

class LayerTiles {
 public:
  static bool suit(const LayerWeights& layer, const at::Tensor& hidden) {
    if (!layer.rounds || hidden.size(1) < kManyTokens || !may_use_tiles()) return false;
    return std::all_of(layer.weights.begin(), layer.weights.end(), [&](const at::Tensor& weight) {
      return widens(hidden, weight) && can_round(weight.size(1));
    });
  }

  // The layer must outlive the calls that follow.
  void take(const LayerWeights& layer) {
    layer_ = &layer;
    for (int i : {kQueries, kKeys, kValues, kOutput, kDown}) tiles_[i].take(layer.weights[i]);
    tiles_[kGate].take(layer.weights[kGate], layer.weights[kUp]);
  }

  // run(first token, how many) by all threads, for as many at a time as stay in a core's cache.
  template <typename run_t>
  void for_tokens(int64_t num_tokens, run_t&& run) const {
    constexpr int64_t kStep = TokenTiles::kTokensAtOnce;
    const int64_t most = steps_at_once();
    at::parallel_for(0, (num_tokens + kStep - 1) / kStep, 1, [&](int64_t begin, int64_t end) {
      const c10::InferenceMode mode;  // threads do not inherit the caller's
      const int64_t num_turns = (end - begin + most - 1) / most;
      for (int64_t turn = 0; turn < num_turns; ++turn) {
        const int64_t first = (begin + (end - begin) * turn / num_turns) * kStep;
        const int64_t stop = (begin + (end - begin) * (turn + 1) / num_turns) * kStep;
        run(first, std::min(stop, num_tokens) - first);
      }
    });
  }

  // Products of some tokens, whose inputs are rounded already.
  void multiply(const TokenTiles& inputs, LayerWeights::Product which, at::Tensor output) const {
    const int64_t num_outputs = tiles_[which].num_outputs();
    float* outputs = output.mutable_data_ptr<float>();
    const OutputRow row(layer_->biases[which], num_outputs);
    multiply_tokens(
        inputs, tiles_[which], [&](int64_t token, int64_t panel, __m512 one, __m512 two) {
          const int64_t first = panel * 2 * kTileSide;
          row.store(outputs + token * num_outputs, first, one);
          row.store(outputs + token * num_outputs, first + kTileSide, two);
        });
  }

  // activation(gate) * up of some tokens, rounded.
  void gate(const TokenTiles& inputs, TokenTiles& gates) const {
    const int64_t num_gates = tiles_[kGate].num_outputs();
    const Activation activation = static_cast<Activation>(layer_->activation);
    const OutputRow gate_row(layer_->biases[kGate], num_gates);
    const OutputRow up_row(layer_->biases[kUp], num_gates);
    gates.start(inputs.num_tokens(), num_gates);
    multiply_tokens(
        inputs, tiles_[kGate], [&](int64_t token, int64_t panel, __m512 gate, __m512 up) {
          const int64_t first = panel * kTileSide;
          gates.put(
              token, first,
              gated(activation, gate_row.with_bias(gate, first), up_row.with_bias(up, first)));
        });
  }

 private:
  using enum LayerWeights::Product;

  int64_t steps_at_once() const {
    constexpr int64_t kCachedBytes = 5 << 18, kMost = 8;
    const int64_t inputs = tiles_[kGate].num_inputs() + tiles_[kDown].num_inputs();
    const int64_t step_bytes = inputs * TokenTiles::kTokensAtOnce * sizeof(c10::BFloat16);
    return std::clamp<int64_t>(kCachedBytes / step_bytes, 1, kMost);
  }

  const LayerWeights* layer_ = nullptr;
  WeightTiles tiles_[kProducts];
};

// As LayerProducts, for some of a layer's tokens; what the layer is asked for goes where that of all
// tokens lies.
class TurnProducts {
 public:
  struct Places {
    at::Tensor query, key, value, output;  // each [1, tokens, outputs]

    Places of(int64_t first, int64_t count) const {
      const auto some = [&](const at::Tensor& all) { return all.narrow(1, first, count); };
      return {some(query), some(key), some(value), some(output)};
    }
  };

  TurnProducts(const LayerTiles& tiles, Places places) : tiles_(tiles), places_(std::move(places)) {}

  std::vector<at::Tensor> heads(const at::Tensor& hidden) const {
    return recorded("relevo::linears", [&] {
      const TokenTiles& inputs = rounded(hidden);
      tiles_.multiply(inputs, LayerWeights::kQueries, places_.query);
      tiles_.multiply(inputs, LayerWeights::kKeys, places_.key);
      tiles_.multiply(inputs, LayerWeights::kValues, places_.value);
      return std::vector{places_.query, places_.key, places_.value};
    });
  }

  at::Tensor output(const at::Tensor& attended) const {
    return recorded("relevo::widening_linear", [&] {
      at::Tensor output = at::empty_like(places_.output);
      tiles_.multiply(rounded(attended), LayerWeights::kOutput, output);
      return output;
    });
  }

  at::Tensor feed_forward(const at::Tensor& hidden) const {
    thread_local TokenTiles gates;
    recorded("relevo::gated_linear", [&] { tiles_.gate(rounded(hidden), gates); });
    recorded("relevo::widening_linear", [&] {
      tiles_.multiply(gates, LayerWeights::kDown, places_.output);
    });
    return places_.output;
  }

 private:
  static const TokenTiles& rounded(const at::Tensor& input) {
    thread_local TokenTiles tiles;
    const at::Tensor lined = input.contiguous();
    tiles.take(lined.const_data_ptr<float>(), input.size(1), input.size(2));
    return tiles;
  }

  const LayerTiles& tiles_;
  const Places places_;
};

#endif
}  // namespace relevo
