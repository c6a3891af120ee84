// e^x of a vector of floats, on every CPU: the compiler's own calls one number at a time.
#pragma once

#include "lanes.h"

namespace relevo {

// With a relative error below 3e-7; beyond +-87 as if it were that.
inline Lanes<float>::type exponential(Lanes<float>::type x) {
  using V = Lanes<float>::type;
  typedef int32_t integers_t __attribute__((vector_size(kLaneBytes)));
  constexpr float kLog2E = 1.44269504f, kMost = 126;
  V y = x * kLog2E;
  y = y > kMost ? V{} + kMost : y;
  y = y < -kMost ? V{} - kMost : y;
  const integers_t whole = __builtin_convertvector(y + 127.5f, integers_t) - 127;  // the nearest
  const V rest = y - __builtin_convertvector(whole, V);
  V power = V{} + 1.54035304e-4f;  // ln(2)^6 / 6!, then those of lower powers
  for (const float factor : {1.33335581e-3f, 9.61812911e-3f, 5.55041087e-2f, 0.240226507f, 0.693147181f, 1.0f})
    power = power * rest + factor;
  return power * (V)((whole + 127) << 23);
}

}  // namespace relevo
