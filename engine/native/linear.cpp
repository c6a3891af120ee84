// Linear layers whose weights are stored narrower than they compute: bfloat16 weights stay the
// checkpoint's own pages, are read once a step at half the bytes, and are widened in registers.
// Products and sums are those of float32 with the same weights.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>

#include "lanes.h"

namespace relevo {
namespace {

// Above, the matrix product of the BLAS library earns back a widened copy of the weights.
constexpr int64_t kManyTokens = 48;
constexpr int kTokensAtOnce = 4;
constexpr int kOutputsAtOnce = 3;

using V = Lanes<float>::type;
constexpr int kWidth = Lanes<float>::count;

// output[token][n] of a few tokens and a few outputs: their dot products over all inputs.
template <int tokens, int outputs>
void few(
    const float* input, const c10::BFloat16* weight, const float* bias, float* output,
    int64_t num_inputs, int64_t num_outputs) {
  V total[tokens][outputs] = {};
  int64_t k = 0;
  for (; k + kWidth <= num_inputs; k += kWidth) {
    V wide[outputs];
#pragma GCC unroll 4
    for (int n = 0; n < outputs; ++n) wide[n] = load(weight + n * num_inputs + k);
#pragma GCC unroll 4
    for (int t = 0; t < tokens; ++t) {
      const V lanes = load(input + t * num_inputs + k);
#pragma GCC unroll 4
      for (int n = 0; n < outputs; ++n) total[t][n] += lanes * wide[n];
    }
  }
  for (int t = 0; t < tokens; ++t)
    for (int n = 0; n < outputs; ++n) {
      float one = sum(total[t][n]) + (bias ? bias[n] : 0.0f);
      for (int64_t rest = k; rest < num_inputs; ++rest)
        one += input[t * num_inputs + rest] * static_cast<float>(weight[n * num_inputs + rest]);
      output[t * num_outputs + n] = one;
    }
}

template <int outputs, int tokens = kTokensAtOnce>
void all_tokens(
    const float* input, const c10::BFloat16* weight, const float* bias, float* output,
    int64_t num_tokens, int64_t num_inputs, int64_t num_outputs) {
  int64_t t = 0;
  for (; t + tokens <= num_tokens; t += tokens)
    few<tokens, outputs>(
        input + t * num_inputs, weight, bias, output + t * num_outputs, num_inputs, num_outputs);
  if constexpr (tokens > 1) {
    if (t < num_tokens)
      all_tokens<outputs, tokens - 1>(
          input + t * num_inputs, weight, bias, output + t * num_outputs, num_tokens - t,
          num_inputs, num_outputs);
  }
}

// The weights in float32, in memory that is kept for the next layer.
at::Tensor widened(const at::Tensor& weight) {
  thread_local at::Tensor kept;
  if (!kept.defined() || kept.numel() < weight.numel())
    kept = at::empty({weight.numel()}, weight.options().dtype(at::kFloat));
  const c10::BFloat16* from = weight.const_data_ptr<c10::BFloat16>();
  float* to = kept.mutable_data_ptr<float>();
  at::parallel_for(0, weight.numel() / kWidth, 4096, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * kWidth; i < end * kWidth; i += kWidth) store(to + i, load(from + i));
  });
  for (int64_t i = weight.numel() / kWidth * kWidth; i < weight.numel(); ++i)
    to[i] = static_cast<float>(from[i]);
  return kept.narrow(0, 0, weight.numel()).view(weight.sizes());
}

// [.., num_inputs] float32, weight [num_outputs, num_inputs] bfloat16 -> [.., num_outputs] float32
at::Tensor widening_linear(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  TORCH_CHECK(input.scalar_type() == at::kFloat, "expected float32 input");
  TORCH_CHECK(weight.scalar_type() == at::kBFloat16 && weight.is_contiguous(),
      "expected contiguous bfloat16 weights");
  TORCH_CHECK(input.size(-1) == weight.size(1), "expected as many inputs as weights");
  const int64_t num_inputs = weight.size(1), num_outputs = weight.size(0);
  const int64_t num_tokens = input.numel() / num_inputs;
  if (num_tokens > kManyTokens) return at::linear(input, widened(weight), bias);
  const at::Tensor lined = input.contiguous();
  auto sizes = input.sizes().vec();
  sizes.back() = num_outputs;
  at::Tensor output = at::empty(sizes, input.options());
  const float* from = lined.const_data_ptr<float>();
  const c10::BFloat16* weights = weight.const_data_ptr<c10::BFloat16>();
  const float* biases = bias ? bias->const_data_ptr<float>() : nullptr;
  float* to = output.mutable_data_ptr<float>();
  const int64_t grain = std::max<int64_t>(kOutputsAtOnce, 32768 / std::max<int64_t>(1, num_inputs));
  at::parallel_for(0, num_outputs, grain, [&](int64_t begin, int64_t end) {
    int64_t n = begin;
    for (; n + kOutputsAtOnce <= end; n += kOutputsAtOnce)
      all_tokens<kOutputsAtOnce>(
          from, weights + n * num_inputs, biases ? biases + n : nullptr, to + n, num_tokens,
          num_inputs, num_outputs);
    for (; n < end; ++n)
      all_tokens<1>(
          from, weights + n * num_inputs, biases ? biases + n : nullptr, to + n, num_tokens,
          num_inputs, num_outputs);
  });
  return output;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(relevo, library) {
  library.def("widening_linear(Tensor input, Tensor weight, Tensor? bias) -> Tensor");
}

TORCH_LIBRARY_IMPL(relevo, CPU, library) { library.impl("widening_linear", widening_linear); }

}  // namespace relevo
