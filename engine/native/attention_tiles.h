// A piece of attention over a bfloat16 cache by tiles: keys are left tiles, queries right ones, so each
// row of the piece is a column. Rows of several KV heads stand side by side where they are few: zeros
// are their queries for the keys of other heads. Weights are turned into left tiles, since values are
// right ones as soon as those of two keys alternate. Keys go by in stretches that start at multiples,
// and what a row does not see adds nothing: a row is computed alike whatever else is in its piece.
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
    TileSums scores[2 * kSteps * 2];  // [tiles of keys, groups]
    alignas(64) Number weights[2][kTileSide][kStretch];
  };

  static bool suits(const TileCall& call) {
    return call.head_dim % kTileInputs == 0 && call.head_stride % kTileInputs == 0 &&
        call.value_dim % kTileSide == 0 && may_use_tiles();
  }

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
        LaneGroup *group = groups_.begin(head), *end = groups_.end(head);
        for (; group + 2 <= end; group += 2) attend<2>(at, group, num_heads);
        if (group < end) attend<1>(at, group, num_heads);
      }
    groups_.finish();
  }

 private:
  // One or two groups with those keys of the stretch that they see.
  template <int num_groups>
  void attend(int at, LaneGroup* groups, int num_heads) {
    int begin = kStretch, end = 0;
    for (int g = 0; g < num_groups; ++g) {
      begin = std::min(begin, groups[g].softmax.begin() - at);
      end = std::max(end, groups[g].softmax.end() - at);
    }
    const int first = std::max(0, begin) / kTileInputs;
    const int num_steps = round_up(std::min(kStretch, end), kTileInputs) / kTileInputs - first;
    if (num_steps <= 0) return;
    for (int step = 0; step < num_steps; ++step)
      score<num_groups>(
          first + step, groups, num_heads, space_.scores + 2 * step * num_groups);
    for (int g = 0; g < num_groups; ++g) {
      const __m512 before = groups[g].softmax.weigh(
          space_.scores + g, num_groups, at + first * kTileInputs, num_steps,
          call_.softcap * kLog2E, space_.weights[g][0], kStretch);
      groups_.rescale(groups[g], before);
    }
    add<num_groups>(first, num_steps, groups, num_heads);
  }

  template <int num_groups>
  void score(int step, const LaneGroup* groups, int num_heads, TileSums* scores) const {
    const Number* both[2] = {space_.keys.keys(2 * step), space_.keys.keys(2 * step + 1)};
    multiply_tiles<2, num_groups>(
        both, space_.keys.stride(), groups->queries, groups_.query_tiles(),
        num_heads * groups_.query_tiles_of_head(), scores);
  }

  template <int num_groups>
  void add(int first_step, int num_steps, LaneGroup* groups, int num_heads) const {
    const Number* weights[num_groups];
    for (int g = 0; g < num_groups; ++g) weights[g] = space_.weights[g][0];
    for (int tile = 0; tile < num_heads * groups_.value_tiles_of_head(); tile += 2)
      multiply_tiles<num_groups, 2, true>(
          weights, kStretch, space_.keys.values() + tile * kSteps + first_step, kSteps, num_steps,
          groups->sums + tile * num_groups);
  }

  const TileCall& call_;
  Space& space_;
  const TilePiece& piece_;
  LaneGroups groups_;
};

}  // namespace relevo
#endif
