// Tensors -> the raw call of a product with bfloat16 weights.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <optional>

#include "narrow_product.h"
#include "rounded_product.h"

namespace relevo {

// Whether the product is one of float32 with weights that are widened on the way.
inline bool widens(const at::Tensor& input, const at::Tensor& weight) {
  return input.scalar_type() == at::kFloat && weight.scalar_type() == at::kBFloat16 &&
      weight.dim() == 2 && weight.is_contiguous();
}

inline at::Tensor empty_output(const at::Tensor& input, const at::Tensor& weight) {
  auto sizes = input.sizes().vec();
  sizes.back() = weight.size(0);
  return at::empty(sizes, input.options());
}

// The input in bfloat16, where its products are to be of that and this CPU has them.
inline std::optional<RoundedRows> rounded_rows(const at::Tensor& input, bool rounds) {
  const int64_t num_inputs = input.size(-1);
  if (!rounds || !can_round(num_inputs)) return std::nullopt;
  return std::optional<RoundedRows>(
      std::in_place, input.const_data_ptr<float>(), input.numel() / num_inputs, num_inputs);
}

// `input` and `output` contiguous; tensors and rows must outlive the call.
inline NarrowProduct narrow_call(
    const at::Tensor& input, const std::optional<RoundedRows>& rounded, const at::Tensor& weight,
    const std::optional<at::Tensor>& bias, at::Tensor& output) {
  TORCH_CHECK(input.size(-1) == weight.size(1), "expected as many inputs as weights");
  TORCH_CHECK(!bias || (bias->is_contiguous() && bias->numel() == weight.size(0)),
      "expected a bias per output");
  NarrowProduct call;
  call.input = input.const_data_ptr<float>();
  call.weight = weight.const_data_ptr<c10::BFloat16>();
  call.bias = bias ? bias->const_data_ptr<float>() : nullptr;
  call.output = output.mutable_data_ptr<float>();
  call.num_inputs = weight.size(1);
  call.num_outputs = weight.size(0);
  call.num_tokens = input.numel() / call.num_inputs;
  call.rounded = rounded ? &*rounded : nullptr;
  return call;
}

inline void run_panels(const NarrowProduct& call, int64_t begin, int64_t end) {
  if (call.rounded)
    rounded_product(call, begin, end);
  else
    narrow_product(call, begin * kPanelOutputs, std::min(end * kPanelOutputs, call.num_outputs));
}

}  // namespace relevo
