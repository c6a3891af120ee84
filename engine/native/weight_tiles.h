// Weights as right tiles, for many tokens: turned once, they meet all tokens, whose sums then come
// out as rows.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include "bfloat16_tiles.h"
#include "lanes.h"

#ifdef __AMX_BF16__
namespace relevo {

// [panels][2][num_inputs / kTileInputs]: a panel has twice kTileSide outputs of one weight, or
// kTileSide of each of two. Outputs that are not there are zeros.
class WeightTiles {
 public:
  // weight [num_outputs, num_inputs] bfloat16, contiguous
  void take(const at::Tensor& weight) {
    start(weight, 2 * kTileSide);
    turn(weight, 1, 0);
  }

  // Two of one shape.
  void take(const at::Tensor& first, const at::Tensor& second) {
    start(first, kTileSide);
    turn(first, 2, 0);
    turn(second, 2, 1);
  }

  int64_t num_inputs() const { return tiles_per_row_ * kTileInputs; }
  int64_t num_outputs() const { return num_outputs_; }  // of each weight
  int64_t tiles_per_row() const { return tiles_per_row_; }
  int64_t num_panels() const { return num_panels_; }
  const RightTile* panel(int64_t number) const { return &tiles_[2 * number * tiles_per_row_]; }

 private:
  void start(const at::Tensor& weight, int64_t outputs_per_panel) {
    num_outputs_ = weight.size(0);
    tiles_per_row_ = weight.size(1) / kTileInputs;
    num_panels_ = (num_outputs_ + outputs_per_panel - 1) / outputs_per_panel;
    const size_t num_tiles = 2 * num_panels_ * tiles_per_row_;
    if (tiles_.size() < num_tiles) tiles_ = Numbers<RightTile>(num_tiles);
  }

  // Rows of kTileSide outputs each, `apart` from each other, from row `first` on.
  void turn(const at::Tensor& weight, int64_t apart, int64_t first) {
    constexpr int64_t kRowsPerThread = 2;
    const c10::BFloat16* weights = weight.const_data_ptr<c10::BFloat16>();
    at::parallel_for(0, 2 * num_panels_ / apart, kRowsPerThread, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        turn_row(weights, row, &tiles_[(row * apart + first) * tiles_per_row_]);
    });
  }

  void turn_row(const c10::BFloat16* weights, int64_t row, RightTile* to) const {
    const int64_t first = row * kTileSide;
    for (int64_t i = 0; i < tiles_per_row_; ++i) {
      __m512i rows[kTileSide];
      for (int64_t output = 0; output < kTileSide; ++output)
        rows[output] = first + output < num_outputs_
            ? _mm512_loadu_si512(weights + (first + output) * num_inputs() + i * kTileInputs)
            : _mm512_setzero_si512();
      transpose(rows);
      std::memcpy(to + i, rows, sizeof(rows));
    }
  }

  int64_t num_outputs_ = 0, tiles_per_row_ = 0, num_panels_ = 0;
  Numbers<RightTile> tiles_;
};

}  // namespace relevo
#endif
