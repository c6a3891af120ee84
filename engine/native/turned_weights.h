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

// Eight numbers of two rows that are four rows apart.
inline TurnedPairs two_rows(const c10::BFloat16* row, int64_t stride) {
  typedef uint32_t half_t __attribute__((vector_size(16)));
  half_t low, high;
  std::memcpy(&low, row, sizeof(low));
  std::memcpy(&high, row + 4 * stride, sizeof(high));
  return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7);
}

// weight [kTurnedOutputs, stride] -> kTurnedInputs / 2 vectors of pairs
inline void turn(const c10::BFloat16* weight, int64_t stride, TurnedPairs* pairs) {
  typedef uint64_t long_t __attribute__((vector_size(32)));
  for (int half = 0; half < 2; ++half) {
    const c10::BFloat16* from = weight + half * kTurnedInputs / 2;
    const TurnedPairs a = two_rows(from, stride), b = two_rows(from + stride, stride);
    const TurnedPairs c = two_rows(from + 2 * stride, stride), d = two_rows(from + 3 * stride, stride);
    const auto low_ab = (long_t)__builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13);
    const auto low_cd = (long_t)__builtin_shufflevector(c, d, 0, 8, 1, 9, 4, 12, 5, 13);
    const auto high_ab = (long_t)__builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
    const auto high_cd = (long_t)__builtin_shufflevector(c, d, 2, 10, 3, 11, 6, 14, 7, 15);
    pairs[4 * half] = (TurnedPairs)__builtin_shufflevector(low_ab, low_cd, 0, 4, 2, 6);
    pairs[4 * half + 1] = (TurnedPairs)__builtin_shufflevector(low_ab, low_cd, 1, 5, 3, 7);
    pairs[4 * half + 2] = (TurnedPairs)__builtin_shufflevector(high_ab, high_cd, 0, 4, 2, 6);
    pairs[4 * half + 3] = (TurnedPairs)__builtin_shufflevector(high_ab, high_cd, 1, 5, 3, 7);
  }
}

// One input's weights of eight outputs, one by one: for what is left of a row.
inline Turned turn_one(const c10::BFloat16* weight, int64_t stride) {
  Turned turned;
  for (int n = 0; n < kTurnedOutputs; ++n) turned[n] = static_cast<float>(weight[n * stride]);
  return turned;
}

}  // namespace relevo
