// Short vectors of the machine's own width, for float and double accumulation.
//
// Written with the compiler's vector extension: one source for AVX2, AVX-512 and NEON.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace relevo {

#ifdef __AVX512F__
constexpr int kLaneBytes = 64;
#else
constexpr int kLaneBytes = 32;
#endif

// What scalars of a kind are added up in.
template <typename scalar_t>
using acc_type = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;

template <typename acc_t>
struct Lanes {
  static constexpr int count = kLaneBytes / sizeof(acc_t);
  typedef acc_t type __attribute__((vector_size(kLaneBytes)));
};

template <typename acc_t>
inline typename Lanes<acc_t>::type load(const acc_t* from) {
  typename Lanes<acc_t>::type lanes;
  std::memcpy(&lanes, from, sizeof(lanes));
  return lanes;
}

// bfloat16 is the upper half of a float.
inline Lanes<float>::type load(const c10::BFloat16* from) {
  typedef uint16_t narrow_t __attribute__((vector_size(kLaneBytes / 2)));
  typedef uint32_t wide_t __attribute__((vector_size(kLaneBytes)));
  narrow_t narrow;
  std::memcpy(&narrow, from, sizeof(narrow));
  return (Lanes<float>::type)(__builtin_convertvector(narrow, wide_t) << 16);
}

inline Lanes<float>::type load(const c10::Half* from) {
  Lanes<float>::type lanes;
  for (int i = 0; i < Lanes<float>::count; ++i) lanes[i] = static_cast<float>(from[i]);
  return lanes;
}

template <typename acc_t>
inline void store(acc_t* to, typename Lanes<acc_t>::type lanes) {
  std::memcpy(to, &lanes, sizeof(lanes));
}

// The sum over all lanes, halved again and again.
template <typename acc_t, int bytes>
inline acc_t sum_halves(const void* from) {
  typedef acc_t half_t __attribute__((vector_size(bytes / 2)));
  half_t halves[2];
  std::memcpy(halves, from, bytes);
  const half_t both = halves[0] + halves[1];
  if constexpr (bytes / 2 == 2 * sizeof(acc_t))
    return both[0] + both[1];
  else
    return sum_halves<acc_t, bytes / 2>(&both);
}

inline float sum(Lanes<float>::type lanes) { return sum_halves<float, kLaneBytes>(&lanes); }

inline double sum(Lanes<double>::type lanes) { return sum_halves<double, kLaneBytes>(&lanes); }

constexpr int round_up(int number, int step) { return (number + step - 1) / step * step; }

}  // namespace relevo
