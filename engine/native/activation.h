// What a gate is put through before it is multiplied with what it lets pass.
#pragma once

#include <cmath>
#include <cstdint>

#include "exponential.h"

namespace relevo {
enum Activation { kSilu, kGeluTanh, kGelu };  // numbered as in `engine/fused/gated_mlp.py`

template <typename scalar_t>
scalar_t activated(Activation activation, scalar_t x) {
  constexpr scalar_t twice_root_of_two_over_pi = 1.59576912160573071176;
  constexpr scalar_t root_of_half = 0.70710678118654752440;
  if (activation == kSilu) return x / (1 + std::exp(-x));
  if (activation == kGeluTanh)  // x / 2 * (1 + tanh(y)) is x / (1 + e^-2y)
    return x / (1 + std::exp(-twice_root_of_two_over_pi * (x + scalar_t(0.044715) * x * x * x)));
  return scalar_t(0.5) * x * std::erfc(-x * root_of_half);
}

// activation(gate) * up. Compiled once: -ffast-math divides differently from place to place.
[[gnu::noinline]] inline Lanes<float>::type gated(
    Activation activation, Lanes<float>::type gate, Lanes<float>::type up) {
  using V = Lanes<float>::type;
  if (activation == kGelu) {
    for (int i = 0; i < Lanes<float>::count; ++i) gate[i] = activated<float>(kGelu, gate[i]);
    return gate * up;
  }
  constexpr float twice_root_of_two_over_pi = 1.59576912f;
  const V y = activation == kSilu
      ? gate
      : twice_root_of_two_over_pi * (gate + 0.044715f * gate * gate * gate);
  return gate / (1 + exponential(-y)) * up;
}

// gate = activation(gate) * up
template <typename scalar_t>
void apply(Activation activation, scalar_t* gate, const scalar_t* up, int64_t count) {
  int64_t i = 0;
  if constexpr (std::is_same_v<scalar_t, float>)
    for (constexpr int width = Lanes<float>::count; i + width <= count; i += width)
      store(gate + i, gated(activation, load(gate + i), load(up + i)));
  for (; i < count; ++i) gate[i] = activated(activation, gate[i]) * up[i];
}

}  // namespace relevo
