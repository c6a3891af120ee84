// activation(input * gate) * (input * up): the first half of a gated feed-forward block.
#pragma once

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/linear.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "narrow_linear.h"

namespace relevo {
enum Activation { kSilu, kGeluTanh, kGelu };  // numbered as in `engine/fused/gated_mlp.py`

constexpr int64_t kGatesPerThread = 4096;

// gate = activation(gate) * up
template <typename scalar_t>
void apply(Activation activation, scalar_t* gate, const scalar_t* up, int64_t count) {
  constexpr scalar_t root_of_two_over_pi = 0.79788456080286535588;
  constexpr scalar_t root_of_half = 0.70710678118654752440;
  if (activation == kSilu)
    for (int64_t i = 0; i < count; ++i) gate[i] = gate[i] / (1 + std::exp(-gate[i])) * up[i];
  else if (activation == kGeluTanh)
    for (int64_t i = 0; i < count; ++i) {
      const scalar_t x = gate[i];
      const scalar_t inner = root_of_two_over_pi * (x + scalar_t(0.044715) * x * x * x);
      gate[i] = scalar_t(0.5) * x * (1 + std::tanh(inner)) * up[i];
    }
  else
    for (int64_t i = 0; i < count; ++i)
      gate[i] = scalar_t(0.5) * gate[i] * (1 + std::erf(gate[i] * root_of_half)) * up[i];
}

inline at::Tensor narrow_gated_linear(
    const at::Tensor& input, const at::Tensor& gate, const at::Tensor& up,
    const std::optional<at::Tensor>& gate_bias, const std::optional<at::Tensor>& up_bias,
    Activation activation) {
  const at::Tensor lined = input.contiguous();
  at::Tensor output = empty_output(lined, gate), ups = empty_output(lined, up);
  const NarrowProduct first = narrow_call(lined, gate, gate_bias, output);
  const NarrowProduct second = narrow_call(lined, up, up_bias, ups);
  const int64_t grain = panels_per_thread(first.num_tokens, first.num_inputs);
  at::parallel_for(0, first.num_panels(), grain, [&](int64_t begin, int64_t end) {
    run_panels(first, begin, end);
    run_panels(second, begin, end);
    const int64_t start = begin * kPanelOutputs;
    const int64_t count = std::min(end * kPanelOutputs, first.num_outputs) - start;
    for (int64_t token = 0; token < first.num_tokens; ++token) {
      const int64_t offset = token * first.num_outputs + start;
      apply(activation, first.output + offset, second.output + offset, count);
    }
  });
  return output;
}

// [.., num_inputs], gate and up [num_outputs, num_inputs] -> [.., num_outputs]
inline at::Tensor gated_linear(
    const at::Tensor& input, const at::Tensor& gate, const at::Tensor& up,
    const std::optional<at::Tensor>& gate_bias, const std::optional<at::Tensor>& up_bias,
    int64_t activation) {
  TORCH_CHECK(gate.sizes() == up.sizes(), "expected weights of one shape");
  TORCH_CHECK(activation >= kSilu && activation <= kGelu, "expected a known activation");
  const Activation kind = static_cast<Activation>(activation);
  if (widens(input, gate) && widens(input, up))
    return narrow_gated_linear(input, gate, up, gate_bias, up_bias, kind);
  at::Tensor output = at::linear(input, gate, gate_bias).contiguous();
  const at::Tensor ups = at::linear(input, up, up_bias).contiguous();
  AT_DISPATCH_FLOATING_TYPES(output.scalar_type(), "gated_linear", [&] {
    scalar_t* gates = output.mutable_data_ptr<scalar_t>();
    const scalar_t* others = ups.const_data_ptr<scalar_t>();
    at::parallel_for(0, output.numel(), kGatesPerThread, [&](int64_t begin, int64_t end) {
      apply(kind, gates + begin, others + begin, end - begin);
    });
  });
  return output;
}

}  // namespace relevo
