// bfloat16 weights turned on their side in registers: the numbers of one output lie side by side in
// memory, and come out as vectors that hold one input's weights of eight outputs.
#pragma once

#include "lanes.h"

namespace relevo {

constexpr int kTurnedOutputs = 8;
constexpr int kTurnedInputs = 16;

typedef float Turned __attribute__((vector_size(32)));
// Two bfloat16 numbers a word: inputs 2 j and 2 j + 1 of eight outputs.
typedef uint32_t TurnedPairs __attribute__((vector_size(32)));

inline Turned first_of(TurnedPairs pairs) { return (Turned)(pairs << 16); }
inline Turned second_of(TurnedPairs pairs) { return (Turned)(pairs & 0xffff0000u); }

// What a pair of vectors gives: words or double words of both, one from each in turn, from the lower
// or the upper half of each 16 bytes. Intrinsics where GCC before 12 has nothing else.
#ifdef __AVX2__
inline TurnedPairs low_words(TurnedPairs a, TurnedPairs b) {
  return (TurnedPairs)_mm256_unpacklo_epi32((__m256i)a, (__m256i)b);
}
inline TurnedPairs high_words(TurnedPairs a, TurnedPairs b) {
  return (TurnedPairs)_mm256_unpackhi_epi32((__m256i)a, (__m256i)b);
}
inline TurnedPairs low_longs(TurnedPairs a, TurnedPairs b) {
  return (TurnedPairs)_mm256_unpacklo_epi64((__m256i)a, (__m256i)b);
}
inline TurnedPairs high_longs(TurnedPairs a, TurnedPairs b) {
  return (TurnedPairs)_mm256_unpackhi_epi64((__m256i)a, (__m256i)b);
}
// Eight numbers of two rows that are four rows apart.
inline TurnedPairs two_rows(const c10::BFloat16* row, int64_t stride) {
  const __m128i low = _mm_loadu_si128((const __m128i*)row);
  const __m128i high = _mm_loadu_si128((const __m128i*)(row + 4 * stride));
  return (TurnedPairs)_mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}
#else
inline TurnedPairs low_words(TurnedPairs a, TurnedPairs b) {
  return __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13);
}
inline TurnedPairs high_words(TurnedPairs a, TurnedPairs b) {
  return __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
}
inline TurnedPairs low_longs(TurnedPairs a, TurnedPairs b) {
  return __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13);
}
inline TurnedPairs high_longs(TurnedPairs a, TurnedPairs b) {
  return __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
}
inline TurnedPairs two_rows(const c10::BFloat16* row, int64_t stride) {
  typedef uint32_t half_t __attribute__((vector_size(16)));
  half_t low, high;
  std::memcpy(&low, row, sizeof(low));
  std::memcpy(&high, row + 4 * stride, sizeof(high));
  return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7);
}
#endif

// weight [kTurnedOutputs, stride] -> kTurnedInputs / 2 vectors of pairs
inline void turn(const c10::BFloat16* weight, int64_t stride, TurnedPairs* pairs) {
  for (int half = 0; half < 2; ++half) {
    const c10::BFloat16* from = weight + half * kTurnedInputs / 2;
    const TurnedPairs a = two_rows(from, stride), b = two_rows(from + stride, stride);
    const TurnedPairs c = two_rows(from + 2 * stride, stride);
    const TurnedPairs d = two_rows(from + 3 * stride, stride);
    TurnedPairs* to = pairs + 4 * half;
    to[0] = low_longs(low_words(a, b), low_words(c, d));
    to[1] = high_longs(low_words(a, b), low_words(c, d));
    to[2] = low_longs(high_words(a, b), high_words(c, d));
    to[3] = high_longs(high_words(a, b), high_words(c, d));
  }
}

// One input's weights of eight outputs, one by one: for what is left of a row.
inline Turned turn_one(const c10::BFloat16* weight, int64_t stride) {
  Turned turned;
  for (int n = 0; n < kTurnedOutputs; ++n) turned[n] = static_cast<float>(weight[n * stride]);
  return turned;
}

}  // namespace relevo
