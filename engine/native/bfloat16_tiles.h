// Tiles of bfloat16 numbers, multiplied and added up in float32 by AMX.
//
// sums[16, 16] += left[16, 32] * right[32, 16]. A sum is made from the first input to the last, 32 at
// a time in an order of the CPU's own, whatever stands in the other rows and columns: a token is
// computed alike alone, in a batch and in a prompt.
#pragma once

#include <c10/util/BFloat16.h>

#ifdef __AMX_BF16__
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

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

// 32 float32 numbers, rounded to bfloat16.
inline __m512i rounded_row(const float* from) {
  return (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + 16), _mm512_loadu_ps(from));
}

// Whether Linux lets this process use the tiles; asked once.
inline bool may_use_tiles() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  static const bool may = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return may;
}

// A thread's tiles, as long as this lives.
class TileUse {
 public:
  TileUse() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } shape;
    asm volatile("" : : "m"(shape));  // the compiler believes that eight bytes of it are read
    _tile_loadconfig(&shape);
  }
  ~TileUse() { _tile_release(); }
  TileUse(const TileUse&) = delete;
};

// sums[l][r] (+)= lefts[l] * right[r] for up to two of each: `num_tiles` left tiles go along a row,
// their rows `stride` numbers apart; right tiles of one r follow each other, those of the next are
// `right_stride` tiles further on. `sums` holds [lefts][rights]. As many numbers as go by are fetched
// into the cache, `ahead` numbers behind them; 0: none.
template <int lefts, int rights, bool adds = false>
inline void multiply_tiles(
    const c10::BFloat16* const (&left)[lefts], int64_t stride, const RightTile* right,
    int64_t right_stride, int num_tiles, TileSums* sums, int64_t ahead = 0) {
  static_assert(lefts >= 1 && lefts <= 2 && rights >= 1 && rights <= 2);
  asm volatile("" : : : "memory");  // nor does it know that tiles are loaded from what was stored
  if constexpr (adds) {
    _tile_loadd(0, &sums[0], 64);
    if constexpr (rights == 2) _tile_loadd(1, &sums[1], 64);
    if constexpr (lefts == 2) _tile_loadd(2, &sums[rights], 64);
    if constexpr (lefts == 2 && rights == 2) _tile_loadd(3, &sums[3], 64);
  } else {
    _tile_zero(0);
    if constexpr (rights == 2) _tile_zero(1);
    if constexpr (lefts == 2) _tile_zero(2);
    if constexpr (lefts == 2 && rights == 2) _tile_zero(3);
  }
  for (int i = 0; i < num_tiles; ++i) {
    // A row is too short for the core to see the next ones coming: it is told line by line.
    if (ahead)
      for (const c10::BFloat16* rows : left)
        for (int line = 0; line < kTileSide; ++line)
          __builtin_prefetch(rows + ahead + (i * kTileSide + line) * kTileInputs);
    _tile_loadd(4, left[0] + i * kTileInputs, stride * 2);
    _tile_loadd(6, right + i, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (rights == 2) {
      _tile_loadd(7, right + right_stride + i, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (lefts == 2) {
      _tile_loadd(5, left[1] + i * kTileInputs, stride * 2);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (rights == 2) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, &sums[0], 64);
  if constexpr (rights == 2) _tile_stored(1, &sums[1], 64);
  if constexpr (lefts == 2) _tile_stored(2, &sums[rights], 64);
  if constexpr (lefts == 2 && rights == 2) _tile_stored(3, &sums[3], 64);
}

}  // namespace relevo
#endif
