// Root mean square norm of each row, times (weight + offset): one pass instead of six operations.
#pragma once

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>

#include <cmath>

namespace relevo {
constexpr int64_t kNormsPerThread = 16384;  // numbers; fewer are not worth waking another thread

// input [.., width], weight [width], of one dtype -> the same shape
inline at::Tensor rms_norm(
    const at::Tensor& input, const at::Tensor& weight, double epsilon, double offset) {
  TORCH_CHECK(weight.dim() == 1 && weight.size(0) == input.size(-1), "expected a weight per column");
  TORCH_CHECK(weight.scalar_type() == input.scalar_type(), "expected one dtype");
  const at::Tensor lined = input.contiguous(), weights = weight.contiguous();
  at::Tensor output = at::empty_like(lined);
  const int64_t width = weight.size(0), num_rows = lined.numel() / width;
  AT_DISPATCH_FLOATING_TYPES(input.scalar_type(), "rms_norm", [&] {
    const scalar_t* from = lined.const_data_ptr<scalar_t>();
    const scalar_t* scales = weights.const_data_ptr<scalar_t>();
    scalar_t* to = output.mutable_data_ptr<scalar_t>();
    const int64_t grain = 1 + kNormsPerThread / width;
    at::parallel_for(0, num_rows, grain, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const scalar_t* numbers = from + row * width;
        scalar_t total = 0;
        for (int64_t i = 0; i < width; ++i) total += numbers[i] * numbers[i];
        const scalar_t factor = 1 / std::sqrt(total / width + scalar_t(epsilon));
        for (int64_t i = 0; i < width; ++i)
          to[row * width + i] = numbers[i] * factor * (scales[i] + scalar_t(offset));
      }
    });
  });
  return output;
}

}  // namespace relevo
