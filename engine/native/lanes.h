// Short vectors of the machine's own width, for float and double accumulation.
//
// Written with the compiler's vector extension: one source for AVX2, AVX-512 and NEON.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstring>
#include <new>
#include <type_traits>
#include <vector>

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

// bfloat16 is the upper half of a float. GCC 12 turns the plain conversion into five instructions,
// so it is spelled out for the CPUs that have one.
inline Lanes<float>::type load(const c10::BFloat16* from) {
  typedef uint32_t wide_t __attribute__((vector_size(kLaneBytes)));
#if defined(__AVX512F__)
  const auto wide = (wide_t)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__AVX2__)
  const auto wide = (wide_t)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from));
#else
  typedef uint16_t narrow_t __attribute__((vector_size(kLaneBytes / 2)));
  narrow_t narrow;
  std::memcpy(&narrow, from, sizeof(narrow));
  const auto wide = __builtin_convertvector(narrow, wide_t);
#endif
  return (Lanes<float>::type)(wide << 16);
}

inline Lanes<float>::type load(const c10::Half* from) {
#if defined(__AVX512F__)
  return (Lanes<float>::type)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__F16C__)
  return (Lanes<float>::type)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
  Lanes<float>::type lanes;
  for (int i = 0; i < Lanes<float>::count; ++i) lanes[i] = static_cast<float>(from[i]);
  return lanes;
#endif
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

// Sums that are to come out alike wherever they are made: -ffast-math may not turn them round.
template <typename vector_t>
inline vector_t add_in_order(vector_t total, vector_t product) {
#ifdef __x86_64__
  // GCC has a builtin for it, but takes vectors of 64 bytes apart there, number by number.
  total += product;
  asm("" : "+v"(total));  // what went through here is not looked into
  return total;
#elif __has_builtin(__builtin_assoc_barrier)
  return __builtin_assoc_barrier(total + product);
#else
  return total + product;
#endif
}

// Memory that starts with a cache line: no vector of it lies in two.
template <typename acc_t>
struct LineAllocator {
  using value_type = acc_t;
  acc_t* allocate(size_t count) {
    return static_cast<acc_t*>(::operator new(count * sizeof(acc_t), std::align_val_t(64)));
  }
  void deallocate(acc_t* numbers, size_t) { ::operator delete(numbers, std::align_val_t(64)); }
  bool operator==(const LineAllocator&) const = default;
};

template <typename acc_t>
using Numbers = std::vector<acc_t, LineAllocator<acc_t>>;

constexpr int round_up(int number, int step) { return (number + step - 1) / step * step; }

}  // namespace relevo
