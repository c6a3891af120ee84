// A piece of attention over a bfloat16 cache by tiles: keys are left tiles, queries right ones, so each
// row of the piece is a column. Rows of several KV heads stand side by side where they are few: zeros
// are their queries for the keys of other heads. Weights are turned into left tiles, since values are
// right ones as soon as those of two keys alternate. Zeros fill up what heads do not. Keys go by in
// stretches that start at multiples, and what a row does not see adds nothing: a row is computed alike
// whatever else is in its piece.
#pragma once

#include "lane_groups.h"

#ifdef __AMX_BF16__
namespace relevo {

class TileRun {
 public:
  using Number = c10::BFloat16;
  using TileCall = KeyStretch::TileCall;

  static constexpr int kStretch = KeyStretch::kKeys, kSteps = KeyStretch::kSteps;

  // Memory of one thread, reused from piece to piece, and its tiles.
  struct Space {
    TileUse use;
    LaneGroups::Space groups;
    KeyStretch keys;
    Numbers<TileSums> scores;  // [groups, tiles of keys]
    Numbers<Number> weights;   // [groups, 16, keys]
  };

  static bool suits(const TileCall&) { return may_use_tiles(); }

  TileRun(const TileCall& call, RowStates& states, Space& space, const TilePiece& piece)
      : call_(call), space_(space), piece_(piece), groups_(call, states, space.groups, piece) {}

  void run() {
    groups_.start();
    const int begin = std::max(piece_.begin, groups_.first_key());
    const int heads_at_once = groups_.heads_at_once();
    for (int at = begin / kStretch * kStretch; at < piece_.end; at += kStretch)
      for (int head = 0; head < piece_.num_heads; head += heads_at_once) {
        const int num_heads = std::min(heads_at_once, piece_.num_heads - head);
        space_.keys.read(
            call_, piece_.requests[0], piece_.first_head + head, num_heads, at,
            std::max(at, begin), std::min(at + kStretch, piece_.end));
        attend(at, head, num_heads);
      }
    groups_.finish();
  }

 private:
  // One or two groups that are multiplied together, and what they see of a stretch.
  struct Seen {
    LaneGroup* groups;
    int num_heads, first_step, num_steps;
    TileSums* scores;  // [tiles of keys, groups]
    Number* weights;   // [groups, rows, keys]
  };

  // Tiles and vectors work in long turns: each change between them costs as much as eight products.
  void attend(int at, int first_head, int num_heads) {
    LaneGroup *const begin = groups_.begin(first_head), *const end = groups_.end(first_head);
    space_.scores.resize((end - begin) * 2 * kSteps);
    space_.weights.resize((end - begin) * kTileSide * kStretch);
    const auto for_seen = [&](auto&& function) {
      for (LaneGroup* groups = begin; groups < end; groups += groups->together) {
        const Seen seen = see(groups, groups - begin, at, num_heads);
        if (seen.num_steps > 0) function(seen);
      }
    };
    for_seen([&](const Seen& seen) {
      for (int step = 0; step < seen.num_steps; ++step) score(seen, step);
    });
    for_seen([&](const Seen& seen) {
      for (int g = 0; g < seen.groups->together; ++g) weigh(seen, g, at);
    });
    for_seen([&](const Seen& seen) {
      for (int tile = 0; tile < num_heads * groups_.value_tiles_of_head(); tile += 2)
        add(seen, tile);
    });
  }

  Seen see(LaneGroup* groups, int number, int at, int num_heads) {
    int begin = kStretch, end = 0;
    for (int g = 0; g < groups->together; ++g) {
      begin = std::min(begin, groups[g].softmax.begin() - at);
      end = std::max(end, groups[g].softmax.end() - at);
    }
    const int first = std::max(0, begin) / kTileInputs;
    return {
        groups, num_heads, first,
        round_up(std::min(kStretch, end), kTileInputs) / kTileInputs - first,
        &space_.scores[number * 2 * kSteps], &space_.weights[number * kTileSide * kStretch]};
  }

  void score(const Seen& seen, int step) const {
    const int key_tile = 2 * (seen.first_step + step), num_groups = seen.groups->together;
    const Number* both[2] = {space_.keys.keys(key_tile), space_.keys.keys(key_tile + 1)};
    const int64_t stride = space_.keys.stride(), between = groups_.query_tiles();
    const int num_tiles = seen.num_heads * groups_.query_tiles_of_head();
    TileSums* scores = seen.scores + 2 * step * num_groups;
    if (num_groups == 2)
      multiply_tiles<2, 2>(both, stride, seen.groups->queries, between, num_tiles, scores);
    else
      multiply_tiles<2, 1>(both, stride, seen.groups->queries, between, num_tiles, scores);
  }

  void weigh(const Seen& seen, int g, int at) const {
    const __m512 before = seen.groups[g].softmax.weigh(
        seen.scores + g, seen.groups->together, at + seen.first_step * kTileInputs, seen.num_steps,
        call_.softcap * kLog2E, seen.weights + g * kTileSide * kStretch, kStretch);
    groups_.rescale(seen.groups[g], before);
  }

  void add(const Seen& seen, int tile) const {
    const RightTile* values = space_.keys.values() + tile * kSteps + seen.first_step;
    TileSums* sums = seen.groups->sums + tile * seen.groups->together;
    if (seen.groups->together == 2)
      multiply_tiles<2, 2, true>(
          {seen.weights, seen.weights + kTileSide * kStretch}, kStretch, values, kSteps,
          seen.num_steps, sums);
    else
      multiply_tiles<1, 2, true>({seen.weights}, kStretch, values, kSteps, seen.num_steps, sums);
  }

  const TileCall& call_;
  Space& space_;
  const TilePiece& piece_;
  LaneGroups groups_;
};

}  // namespace relevo
#endif
