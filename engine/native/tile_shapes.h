// Tiles of bfloat16 numbers and of their sums, and how they are filled.
#pragma once

#ifdef __AVX512BF16__
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace relevo {

constexpr int kTileSide = 16;    // rows of a left tile, columns of a right one
constexpr int kTileInputs = 32;  // columns of a left tile, rows of a right one

// Right tiles hold two rows side by side: of each pair of inputs, each column's two numbers.
struct alignas(64) RightTile {
  __m512i pairs[kTileInputs / 2];
};

// Sums of one tile, row by row.
struct alignas(64) TileSums {
  __m512 rows[kTileSide];
};

// 16 rows of 16 numbers of 32 bits -> columns.
template <typename vector_t>
inline void transpose(vector_t (&rows)[16]) {
  static_assert(sizeof(vector_t) == 64);
  __m512i a[16], b[16];
  std::memcpy(a, rows, sizeof(a));
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    b[i] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88);
    b[i + 4] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
    b[i + 8] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
    b[i + 12] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    a[i] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88);
    a[i + 8] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd);
    a[i + 4] = _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0x88);
    a[i + 12] = _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0xdd);
  }
  std::memcpy(rows, a, sizeof(a));
}

// In rows that are `apart` from each other, numbers of 16 bits alternate: of each eight the first
// four, and the others.
template <int apart>
inline void alternate(__m512i (&rows)[16]) {
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    if ((i & apart) != 0) continue;
    const __m512i first = rows[i], second = rows[i + apart];
    rows[i] = _mm512_unpacklo_epi16(first, second);
    rows[i + apart] = _mm512_unpackhi_epi16(first, second);
  }
}

// Columns of 16 numbers of 16 bits -> 16 rows of 32. Columns 8 apart come in one vector: 0 and 8, 1
// and 9, ..., 7 and 15, 16 and 24, ..., 23 and 31.
inline void transpose_columns(__m512i (&columns)[16]) {
  alternate<4>(columns);
  alternate<2>(columns);
  alternate<1>(columns);
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const __m512i first = columns[i], second = columns[i + 8];
    columns[i] = _mm512_shuffle_i32x4(first, second, 0x88);
    columns[i + 8] = _mm512_shuffle_i32x4(first, second, 0xdd);
  }
}

// The first of 16 numbers, as many as there are.
inline __mmask16 first_of_16(int64_t count) {
  return (1u << std::clamp<int64_t>(count, 0, 16)) - 1;
}

// 32 float32 numbers, rounded to bfloat16.
inline __m512i rounded_row(const float* from) {
  return (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + 16), _mm512_loadu_ps(from));
}

}  // namespace relevo
#endif
