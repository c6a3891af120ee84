// activation(input * gate) * (input * up): the first half of a gated feed-forward block.
#pragma once

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/linear.h>

#include <algorithm>
#include <optional>

#include "activation.h"
#include "narrow_linear.h"

namespace relevo {
constexpr int64_t kGatesPerThread = 4096;

inline at::Tensor narrow_gated_linear(
    const at::Tensor& input, const at::Tensor& gate, const at::Tensor& up,
    const std::optional<at::Tensor>& gate_bias, const std::optional<at::Tensor>& up_bias,
    Activation activation, bool rounds) {
  const at::Tensor lined = input.contiguous();
  at::Tensor output = empty_output(lined, gate), ups = empty_output(lined, up);
  const std::optional<RoundedRows> rounded = rounded_rows(lined, rounds);
  const NarrowProduct first = narrow_call(lined, rounded, gate, gate_bias, output);
  const NarrowProduct second = narrow_call(lined, rounded, up, up_bias, ups);
  const int64_t grain = panels_per_thread(first.num_tokens, first.num_inputs);
  at::parallel_for(0, first.num_panels(), grain, [&](int64_t begin, int64_t end) {
    if (rounded) return rounded_gates(first, second, activation, begin, end);
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
    int64_t activation, bool rounds) {
  TORCH_CHECK(gate.sizes() == up.sizes(), "expected weights of one shape");
  TORCH_CHECK(activation >= kSilu && activation <= kGelu, "expected a known activation");
  const Activation kind = static_cast<Activation>(activation);
  if (widens(input, gate) && widens(input, up))
    return narrow_gated_linear(input, gate, up, gate_bias, up_bias, kind, rounds);
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
