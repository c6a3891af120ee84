// Some tokens' inputs, rounded to bfloat16, as left tiles, and their products with weights in tiles.
#pragma once

#include <algorithm>

#include "bfloat16_tiles.h"
#include "weight_tiles.h"

#ifdef __AMX_BF16__
namespace relevo {

// Left tiles, [groups of kTileSide tokens][num_inputs / kTileInputs]. The number of groups is even:
// what comes of the rows behind the last token is not looked at.
class TokenTiles {
 public:
  static constexpr int64_t kTokensAtOnce = 2 * kTileSide;

  void start(int64_t num_tokens, int64_t num_inputs) {
    num_tokens_ = num_tokens;
    tiles_per_group_ = num_inputs / kTileInputs;
    const size_t num_tiles = num_groups() * tiles_per_group_;
    if (tiles_.size() < num_tiles) tiles_ = Numbers<RightTile>(num_tiles);
  }

  // input [num_tokens, num_inputs]
  void take(const float* input, int64_t num_tokens, int64_t num_inputs) {
    start(num_tokens, num_inputs);
    for (int64_t group = 0; group < num_groups(); ++group)
      for (int64_t i = 0; i < tiles_per_group_; ++i)
        for (int64_t row = 0; row < kTileSide; ++row) {
          const int64_t token = std::min(group * kTileSide + row, num_tokens - 1);
          tiles_[group * tiles_per_group_ + i].pairs[row] =
              rounded_row(input + token * num_inputs + i * kTileInputs);
        }
  }

  // kTileSide inputs of a token from `first` on, a multiple of that.
  void put(int64_t token, int64_t first, __m512 inputs) {
    RightTile& tile = tiles_[token / kTileSide * tiles_per_group_ + first / kTileInputs];
    auto* row = reinterpret_cast<c10::BFloat16*>(&tile.pairs[token % kTileSide]);
    const __m256bh rounded = _mm512_cvtneps_pbh(inputs);
    std::memcpy(row + first % kTileInputs, &rounded, sizeof(rounded));
  }

  int64_t num_tokens() const { return num_tokens_; }
  int64_t num_groups() const {
    return (num_tokens_ + kTokensAtOnce - 1) / kTokensAtOnce * 2;
  }
  const c10::BFloat16* group(int64_t number) const {
    return reinterpret_cast<const c10::BFloat16*>(&tiles_[number * tiles_per_group_]);
  }

 private:
  int64_t num_tokens_ = 0, tiles_per_group_ = 0;
  Numbers<RightTile> tiles_;
};

// finish(token, panel, sums of the panel's first outputs, of the others) for each token and panel,
// while the next ones are multiplied.
template <typename finish_t>
inline void multiply_tokens(const TokenTiles& tokens, const WeightTiles& weights, finish_t&& finish) {
  constexpr int kTileBytes = sizeof(RightTile), kTokens = TokenTiles::kTokensAtOnce;
  const int num_tiles = weights.tiles_per_row(), num_pairs = tokens.num_groups() / 2;
  const int tokens_per_step = (kTokens + num_tiles - 1) / num_tiles;
  const int bytes_per_step = round_up(2 * kTileBytes, 64 * num_pairs) / num_pairs;
  TileSums sums[2][4];
  int64_t first_token = tokens.num_tokens(), panel_before = 0;  // of sums that are not finished
  int own = 0;
  const TileUse use;
  const auto finish_some = [&](int begin, int count) {
    const TileSums* before = sums[1 - own];
    const int64_t left = tokens.num_tokens() - first_token;
    for (int i = begin; i < std::min<int64_t>({begin + count, kTokens, left}); ++i) {
      const TileSums* both = before + i / kTileSide * 2;
      finish(
          first_token + i, panel_before, both[0].rows[i % kTileSide], both[1].rows[i % kTileSide]);
    }
  };
  for (int64_t panel = 0; panel < weights.num_panels(); ++panel) {
    const RightTile* right = weights.panel(panel);
    const char* ahead = reinterpret_cast<const char*>(right + 2 * num_tiles);
    for (int64_t pair = 0; pair < num_pairs; ++pair, own = 1 - own) {
      const c10::BFloat16* const both[] = {tokens.group(2 * pair), tokens.group(2 * pair + 1)};
      const auto beside = [&](int step) {
        for (int i = 0; i < bytes_per_step; i += 64) __builtin_prefetch(ahead + i, 0, 2);
        ahead += bytes_per_step;
        finish_some(step * tokens_per_step, tokens_per_step);
      };
      multiply_tiles<2, 2, false, true>(
          both, kTileInputs, right, num_tiles, num_tiles, sums[own], beside,
          kTileSide * kTileInputs);
      first_token = pair * kTokens;
      panel_before = panel;
    }
  }
  finish_some(0, kTokens);
}

}  // namespace relevo
#endif
