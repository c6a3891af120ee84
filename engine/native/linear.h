// Linear layers that share their input. Weights may be stored narrower than they compute: bfloat16
// weights stay the checkpoint's own pages, are read once a step at half the bytes, and are widened
// in registers. Products and sums are those of float32 with the same weights, or, where the caller
// rounds, those of inputs in bfloat16, with sums in float32.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/linear.h>

#include <optional>
#include <vector>

#include "narrow_linear.h"

namespace relevo {
using Biases = c10::List<std::optional<at::Tensor>>;

// One round of threads over the panels of all weights.
inline std::vector<at::Tensor> narrow_linears(
    const at::Tensor& input, at::TensorList weights, const Biases& biases, bool rounds) {
  const at::Tensor lined = input.contiguous();
  const std::optional<RoundedRows> rounded = rounded_rows(lined, rounds);
  std::vector<at::Tensor> outputs;
  std::vector<NarrowProduct> calls;
  std::vector<int64_t> ends;  // of the panels of each weight, counted through
  int64_t num_panels = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    outputs.push_back(empty_output(lined, weights[i]));
    calls.push_back(narrow_call(lined, rounded, weights[i], biases.get(i), outputs.back()));
    ends.push_back(num_panels += calls.back().num_panels());
  }
  const int64_t grain = panels_per_thread(calls[0].num_tokens, calls[0].num_inputs);
  at::parallel_for(0, num_panels, grain, [&](int64_t begin, int64_t end) {
    for (size_t i = 0; i < calls.size(); ++i) {
      const int64_t start = i ? ends[i - 1] : 0;
      const int64_t own_begin = std::max(begin, start), own_end = std::min(end, ends[i]);
      if (own_begin < own_end) run_panels(calls[i], own_begin - start, own_end - start);
    }
  });
  return outputs;
}

// [.., num_inputs], each weight [num_outputs, num_inputs] -> [.., num_outputs] of each
inline std::vector<at::Tensor> linears(
    const at::Tensor& input, at::TensorList weights, const Biases& biases, bool rounds) {
  TORCH_CHECK(weights.size() > 0 && weights.size() == biases.size(), "expected a bias or none each");
  bool is_narrow = true;
  for (const at::Tensor& weight : weights) is_narrow = is_narrow && widens(input, weight);
  if (is_narrow) return narrow_linears(input, weights, biases, rounds);
  std::vector<at::Tensor> outputs;
  for (size_t i = 0; i < weights.size(); ++i)
    outputs.push_back(at::linear(input, weights[i], biases.get(i)));
  return outputs;
}

// [.., num_inputs] float32, weight [num_outputs, num_inputs] bfloat16 -> [.., num_outputs] float32
inline at::Tensor widening_linear(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
    bool rounds) {
  TORCH_CHECK(widens(input, weight), "expected float32 input and contiguous bfloat16 weights");
  const at::Tensor lined = input.contiguous();
  at::Tensor output = empty_output(lined, weight);
  const std::optional<RoundedRows> rounded = rounded_rows(lined, rounds);
  const NarrowProduct call = narrow_call(lined, rounded, weight, bias, output);
  const int64_t grain = panels_per_thread(call.num_tokens, call.num_inputs);
  at::parallel_for(0, call.num_panels(), grain, [&](int64_t begin, int64_t end) {
    run_panels(call, begin, end);
  });
  return output;
}

// One product, whatever its weight is stored in.
inline at::Tensor project(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
    bool rounds) {
  return widens(input, weight) ? widening_linear(input, weight, bias, rounds)
                               : at::linear(input, weight, bias);
}

}  // namespace relevo
