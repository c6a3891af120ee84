// What a gate is put through before it is multiplied with what it lets pass.
#pragma once

#include <cmath>
#include <cstdint>

namespace relevo {
enum Activation { kSilu, kGeluTanh, kGelu };  // numbered as in `engine/fused/gated_mlp.py`

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

}  // namespace relevo
