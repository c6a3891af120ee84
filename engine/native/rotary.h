// Rotary position embedding of queries and keys, in place: the halves of a head turn as pairs.
#pragma once

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

namespace relevo {
constexpr int64_t kTurnsPerThread = 16384;

template <typename scalar_t>
void turn(scalar_t* head, const scalar_t* cosine, const scalar_t* sine, int64_t half) {
  for (int64_t d = 0; d < half; ++d) {
    const scalar_t left = head[d], right = head[d + half];
    head[d] = left * cosine[d] - right * sine[d];
    head[d + half] = right * cosine[d + half] + left * sine[d + half];
  }
}

// heads [tokens, heads, head_dim]; cosine, sine [tokens, rotary_dim]: what is behind them stays
inline void rotary(at::Tensor query, at::Tensor key, const at::Tensor& cosine, const at::Tensor& sine) {
  const int64_t num_tokens = query.size(0), width = cosine.size(1);
  TORCH_CHECK(query.is_contiguous() && key.is_contiguous(), "expected contiguous heads");
  TORCH_CHECK(cosine.is_contiguous() && sine.is_contiguous(), "expected contiguous angles");
  TORCH_CHECK(
      cosine.sizes() == sine.sizes() && cosine.size(0) == num_tokens && key.size(0) == num_tokens,
      "expected a row of angles per token");
  TORCH_CHECK(width % 2 == 0 && width <= query.size(2) && width <= key.size(2),
      "expected heads at least as wide as the angles");
  TORCH_CHECK(
      query.scalar_type() == key.scalar_type() && query.scalar_type() == cosine.scalar_type() &&
          query.scalar_type() == sine.scalar_type(),
      "expected one dtype");
  AT_DISPATCH_FLOATING_TYPES(query.scalar_type(), "rotary", [&] {
    const scalar_t* cosines = cosine.const_data_ptr<scalar_t>();
    const scalar_t* sines = sine.const_data_ptr<scalar_t>();
    for (at::Tensor* heads : {&query, &key}) {
      scalar_t* numbers = heads->mutable_data_ptr<scalar_t>();
      const int64_t num_heads = heads->size(1), head_dim = heads->size(2);
      const int64_t grain = 1 + kTurnsPerThread / (num_heads * head_dim);
      at::parallel_for(0, num_tokens, grain, [&](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; ++token)
          for (int64_t head = 0; head < num_heads; ++head)
            turn(numbers + (token * num_heads + head) * head_dim, cosines + token * width,
                sines + token * width, width / 2);
      });
    }
  });
}

}  // namespace relevo
