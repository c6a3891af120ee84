// Inputs of products with bfloat16 weights, rounded to bfloat16 once for all weights they meet.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <utility>

#include "bfloat16_tiles.h"
#include "lanes.h"

namespace relevo {

#ifdef __AVX512BF16__

// Whether this CPU has the arithmetic, for rows of so many numbers.
inline bool can_round(int64_t num_inputs) {
  return num_inputs % kTileInputs == 0;
}

// Tiles, [groups of kTileSide tokens][num_inputs / kTileInputs]; a last group is filled up with zeros.
// They are right ones, or, where this process may use no tiles, rows of tokens.
class RoundedRows {
 public:
  // input [num_tokens, num_inputs], contiguous
  RoundedRows(const float* input, int64_t num_tokens, int64_t num_inputs)
      : num_tokens_(num_tokens),
        tiles_per_group_(num_inputs / kTileInputs),
        tiles_(std::exchange(kept(), {})) {
    const size_t num_tiles = num_groups() * tiles_per_group_;
    if (tiles_.size() < num_tiles) tiles_ = Numbers<RightTile>(num_tiles);
    at::parallel_for(0, num_groups(), kGroupsPerThread, [&](int64_t begin, int64_t end) {
      for (int64_t group = begin; group < end; ++group)
        pack(input + group * kTileSide * num_inputs, num_inputs, group);
    });
  }

  ~RoundedRows() { kept() = std::move(tiles_); }
  RoundedRows(const RoundedRows&) = delete;

  int64_t num_tokens() const { return num_tokens_; }
  int64_t tiles_per_group() const { return tiles_per_group_; }
  int64_t num_groups() const { return (num_tokens_ + kTileSide - 1) / kTileSide; }
  int64_t tokens_in(int64_t group) const {
    return std::min<int64_t>(kTileSide, num_tokens_ - group * kTileSide);
  }
  const RightTile* group(int64_t number) const { return &tiles_[number * tiles_per_group_]; }

 private:
  static constexpr int64_t kGroupsPerThread = 4;

  // Of this thread's last product: fresh pages cost as much as filling them.
  static Numbers<RightTile>& kept() {
    thread_local Numbers<RightTile> tiles;
    return tiles;
  }

  void pack(const float* rows, int64_t num_inputs, int64_t group) {
    for (int64_t i = 0; i < tiles_per_group_; ++i) {
      RightTile& tile = tiles_[group * tiles_per_group_ + i];
      const int64_t count = tokens_in(group);
      for (int64_t token = 0; token < count; ++token)
        tile.pairs[token] = rounded_row(rows + token * num_inputs + i * kTileInputs);
      std::fill(tile.pairs + count, tile.pairs + kTileSide, _mm512_setzero_si512());
      if (may_use_tiles()) transpose(tile.pairs);
    }
  }

  int64_t num_tokens_, tiles_per_group_;
  Numbers<RightTile> tiles_;
};

#else

inline bool can_round(int64_t) { return false; }

class RoundedRows {
 public:
  RoundedRows(const float*, int64_t, int64_t) {}
};

#endif
}  // namespace relevo
