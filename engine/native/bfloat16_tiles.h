// Tiles of bfloat16 numbers, multiplied and added up in float32 by AMX.
//
// sums[16, 16] += left[16, 32] * right[32, 16]. A sum is made from the first input to the last, 32 at
// a time in an order of the CPU's own, whatever stands in the other rows and columns: a token is
// computed alike alone, in a batch and in a prompt.
#pragma once

#include <c10/util/BFloat16.h>

#include "tile_shapes.h"

#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#endif

namespace relevo {

#ifdef __AMX_BF16__

// Whether Linux lets this process use the tiles; asked once.
inline bool may_use_tiles() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  static const bool may = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return may;
}

// A thread's tiles, as long as this lives; nothing where it may not use them.
class TileUse {
 public:
  TileUse() {
    if (!may_use_tiles()) return;
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } shape;
    asm volatile("" : : "m"(shape));  // the compiler believes that eight bytes of it are read
    _tile_loadconfig(&shape);
  }
  ~TileUse() {
    if (may_use_tiles()) _tile_release();
  }
  TileUse(const TileUse&) = delete;
};

// Nothing is done beside a product.
struct Nothing {
  void operator()(int) const {}
};

// sums[l][r] (+)= lefts[l] * right[r] for up to two of each: `num_tiles` left tiles go along a row,
// `step` numbers apart, their rows `stride` numbers; right tiles of one r follow each other, those of
// the next are `right_stride` tiles further on. `sums` holds [lefts][rights]. beside(i) is called once
// for each tile along the row: tiles and vectors are multiplied side by side. Left tiles that are
// streamed leave the first cache to the right ones, which come again sooner.
template <
    int lefts, int rights, bool adds = false, bool streams = false, typename beside_t = Nothing>
inline void multiply_tiles(
    const c10::BFloat16* const (&left)[lefts], int64_t stride, const RightTile* right,
    int64_t right_stride, int num_tiles, TileSums* sums, beside_t&& beside = {},
    int64_t step = kTileInputs) {
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
    beside(i);
    if constexpr (streams)
      _tile_stream_loadd(4, left[0] + i * step, stride * 2);
    else
      _tile_loadd(4, left[0] + i * step, stride * 2);
    _tile_loadd(6, right + i, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (rights == 2) {
      _tile_loadd(7, right + right_stride + i, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (lefts == 2) {
      if constexpr (streams)
        _tile_stream_loadd(5, left[1] + i * step, stride * 2);
      else
        _tile_loadd(5, left[1] + i * step, stride * 2);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (rights == 2) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, &sums[0], 64);
  if constexpr (rights == 2) _tile_stored(1, &sums[1], 64);
  if constexpr (lefts == 2) _tile_stored(2, &sums[rights], 64);
  if constexpr (lefts == 2 && rights == 2) _tile_stored(3, &sums[3], 64);
}

#else

inline bool may_use_tiles() { return false; }
struct TileUse {};

#endif
}  // namespace relevo
