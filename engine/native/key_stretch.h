// A stretch of keys and values of some KV heads, made ready for tiles: keys lie where they are as left
// tiles wherever blocks allow it, values become right tiles.
#pragma once

#include <algorithm>

#include "attention_piece.h"
#include "tile_shapes.h"

#ifdef __AMX_BF16__
namespace relevo {

class KeyStretch {
 public:
  using Number = c10::BFloat16;
  using TileCall = Call<float, Number>;

  static constexpr int kKeys = 64, kSteps = kKeys / kTileInputs;

  // Keys from position `at` on, a multiple of their number. Only those from `begin` to `end` are sure
  // to be there; a key in the place of one that is not is hidden from every row.
  void read(
      const TileCall& call, int request, int first_head, int num_heads, int at, int begin, int end) {
    nothing_.resize(num_heads * call.head_stride);
    find(call, request, first_head, at, begin, end);
    pair_values((num_heads - 1) * call.head_stride + call.value_dim);
    stride_ = call.token_stride;
    if (!lie_as_tiles(call)) copy_keys(num_heads * call.head_dim);
  }

  const Number* keys(int tile) const { return keys_[tile * kTileSide]; }
  int64_t stride() const { return stride_; }  // from key to key

  // [numbers / 16, kSteps]: of each two tiles the first has the first four of eight numbers.
  const RightTile* values() const { return paired_.data(); }

 private:
  static bool lie_as_tiles(const TileCall& call) {
    return call.block_size % kTileSide == 0 && call.head_dim % kTileInputs == 0;
  }

  void find(const TileCall& call, int request, int head, int at, int begin, int end) {
    for (int i = 0; i < kKeys; ++i) keys_[i] = values_[i] = nothing_.data();
    for (int position = begin; position < end;) {
      const Number* key = call.slot(request, position, 0, head);
      const int left = call.block_size - position % call.block_size;
      for (const int stop = std::min(end, position + left); position < stop; ++position) {
        keys_[position - at] = key;
        values_[position - at] = key + call.plane_stride;
        key += call.token_stride;
      }
    }
    if (!lie_as_tiles(call)) return;
    for (int tile = 0; tile < kKeys; tile += kTileSide) {
      const int seen = std::clamp(at + tile, begin, end - 1);
      keys_[tile] = call.slot(request, seen / kTileSide * kTileSide, 0, head);
    }
  }

  // `width` numbers of each value, and zeros behind them.
  void pair_values(int width) {
    const int num_tiles = round_up(width, kTileInputs) / kTileSide;
    paired_.resize(size_t(num_tiles) * kSteps);
    for (int key = 0; key < kKeys; key += 2) {
      RightTile* to = &paired_[key / kTileInputs];
      const int pair = key % kTileInputs / 2;
      for (int tile = 0; tile < num_tiles; tile += 2) {
        const int first = tile * kTileSide;
        const __mmask32 there = 0xffffffffu >> std::max(0, first + kTileInputs - width);
        const __m512i even = _mm512_maskz_loadu_epi16(there, values_[key] + first);
        const __m512i odd = _mm512_maskz_loadu_epi16(there, values_[key + 1] + first);
        to[tile * kSteps].pairs[pair] = _mm512_unpacklo_epi16(even, odd);
        to[(tile + 1) * kSteps].pairs[pair] = _mm512_unpackhi_epi16(even, odd);
      }
    }
  }

  // Zeros behind `width` numbers of each.
  void copy_keys(int width) {
    stride_ = round_up(width, kTileInputs);
    copies_.resize(kKeys * stride_);
    for (int key = 0; key < kKeys; ++key) {
      Number* to = &copies_[key * stride_];
      std::fill(std::copy_n(keys_[key], width, to), to + stride_, Number(0));
    }
    for (int key = 0; key < kKeys; key += kTileSide) keys_[key] = &copies_[key * stride_];
  }

  const Number *keys_[kKeys], *values_[kKeys];
  int64_t stride_;
  Numbers<Number> copies_;    // [keys, heads, head_dim]
  Numbers<Number> nothing_;   // a key or value that is not there
  Numbers<RightTile> paired_;
};

}  // namespace relevo
#endif
