// Tiles of bfloat16 numbers and of their sums, and how they are filled.
#pragma once

#ifdef __AVX512BF16__
#include <immintrin.h>

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

// 32 float32 numbers, rounded to bfloat16.
inline __m512i rounded_row(const float* from) {
  return (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + 16), _mm512_loadu_ps(from));
}

}  // namespace relevo
#endif
