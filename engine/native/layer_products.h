// The products of a decoder layer: of a few tokens with weights where they lie.
#pragma once

#include <ATen/record_function.h>

#include <optional>
#include <utility>
#include <vector>

#include "gated_linear.h"
#include "linear.h"

namespace relevo {

// A part of the layer, for profilers: by the name that it has as an operation of its own.
template <typename function_t>
auto recorded(const char* name, function_t&& function) {
  RECORD_FUNCTION(name, c10::ArrayRef<const c10::IValue>{});
  return function();
}

// What a layer multiplies with.
struct LayerWeights {
  enum Product { kQueries, kKeys, kValues, kOutput, kGate, kUp, kDown, kProducts };

  std::vector<at::Tensor> weights;                 // each [outputs, inputs]
  std::vector<std::optional<at::Tensor>> biases;  // each [outputs]
  int64_t activation;
  bool rounds = false;  // inputs to bfloat16, where this CPU has products of that
};

class LayerProducts {
 public:
  explicit LayerProducts(const LayerWeights& layer) : layer_(layer) {}

  // [1, tokens, width] -> queries, keys and values, each [1, tokens, outputs]
  std::vector<at::Tensor> heads(const at::Tensor& hidden) const {
    const auto& weights = layer_.weights;
    const auto& biases = layer_.biases;
    return recorded("relevo::linears", [&] {
      return linears(
          hidden, {weights[kQueries], weights[kKeys], weights[kValues]},
          Biases({biases[kQueries], biases[kKeys], biases[kValues]}), layer_.rounds);
    });
  }

  // [1, tokens, heads * value_dim] -> [1, tokens, width]
  at::Tensor output(const at::Tensor& attended) const { return product(attended, kOutput); }

  // [1, tokens, width] -> the same shape
  at::Tensor feed_forward(const at::Tensor& hidden) const {
    const at::Tensor gated = recorded("relevo::gated_linear", [&] {
      return gated_linear(
          hidden, layer_.weights[kGate], layer_.weights[kUp], layer_.biases[kGate],
          layer_.biases[kUp], layer_.activation, layer_.rounds);
    });
    return product(gated, kDown);
  }

 private:
  using enum LayerWeights::Product;

  at::Tensor product(const at::Tensor& input, LayerWeights::Product which) const {
    return recorded("relevo::widening_linear", [&] {
      return project(input, layer_.weights[which], layer_.biases[which], layer_.rounds);
    });
  }

  const LayerWeights& layer_;
};

}  // namespace relevo
