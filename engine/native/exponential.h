// e^x of a vector of floats, on every CPU: the compiler's own calls one number at a time.
#pragma once

#include "lanes.h"

namespace relevo {

constexpr float kLog2E = 1.44269504f;

#ifdef __AVX512DQ__

// 2^x with a relative error below 2e-7; 1 for 0, 0 for whatever is far below, NaN for NaN.
inline __m512 power_of_two(__m512 x) {
  const __m512 rest = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // 0 to 1
  __m512 power = _mm512_set1_ps(0.00186713168f);
  for (const float factor : {0.00901702698f, 0.0557999164f, 0.240164444f, 0.693151295f, 1.0f})
    power = _mm512_fmadd_ps(power, rest, _mm512_set1_ps(factor));
  return _mm512_scalef_ps(power, x);
}

#else

// 2^x with a relative error below 3e-7, for x of 126 at most; below -126 as if it were that.
inline Lanes<float>::type power_of_two(Lanes<float>::type x) {
  using V = Lanes<float>::type;
  typedef int32_t integers_t __attribute__((vector_size(kLaneBytes)));
  constexpr float kMost = 126;
  x = x < -kMost ? V{} - kMost : x;
  const integers_t whole = __builtin_convertvector(x + 127.5f, integers_t) - 127;  // the nearest
  const V rest = x - __builtin_convertvector(whole, V);
  V power = V{} + 1.54035304e-4f;  // ln(2)^6 / 6!, then those of lower powers
  for (const float factor : {1.33335581e-3f, 9.61812911e-3f, 5.55041087e-2f, 0.240226507f, 0.693147181f, 1.0f})
    power = power * rest + factor;
  return power * (V)((whole + 127) << 23);
}

#endif

// Beyond 87 as if it were that: what is divided by it must not be infinite, with -ffast-math.
inline Lanes<float>::type exponential(Lanes<float>::type x) {
  using V = Lanes<float>::type;
  constexpr float kMost = 126;
  const V y = x * kLog2E;
  return (V)power_of_two(y > kMost ? V{} + kMost : y);
}

}  // namespace relevo
