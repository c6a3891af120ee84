// The rows of a piece of attention, 16 to a group: their queries as right tiles, their sums, and where
// these go.
#pragma once

#include <cstring>

#include "key_stretch.h"
#include "tile_pieces.h"
#include "tile_softmax.h"

#ifdef __AMX_BF16__
namespace relevo {

// Rows of each KV head lie next to each other: with few of them a group has several heads.
struct LaneGroup {
  struct Row {
    int kv_head;  // of those in the group
    int head, request, token;
  };

  RowsInLanes softmax;
  Row rows[kTileSide];  // behind the last one stands that one again
  int num_rows;
  const RightTile* queries;  // [KV heads, head_dim / 32], the last one filled up with zeros
  TileSums* sums;  // [KV heads, value_dim / 32, `together`, 2]
  int together;    // groups that are multiplied together, one or two

  __m512& sums_of(int kv_head_tile, int lane) {
    return sums[kv_head_tile / 2 * 2 * together + kv_head_tile % 2].rows[lane];
  }
};

class LaneGroups {
 public:
  using TileCall = KeyStretch::TileCall;

  // Memory of one thread, reused from piece to piece.
  struct Space {
    Numbers<LaneGroup> groups;
    Numbers<RightTile> queries;
    Numbers<TileSums> sums;
  };

  LaneGroups(const TileCall& call, RowStates& states, Space& space, const TilePiece& piece)
      : call_(call), states_(states), space_(space), piece_(piece) {
    const bool lie_together = call.head_dim == call.head_stride &&
        call.head_dim % kTileInputs == 0 &&
        round_up(call.value_dim, kTileInputs) == call.head_stride;
    num_heads_ = lie_together ? std::clamp(kTileSide / piece.num_rows, 1, piece.num_heads) : 1;
    num_groups_ = round_up(num_heads_ * piece.num_rows, kTileSide) / kTileSide;
    query_tiles_ = round_up(call.head_dim, kTileInputs) / kTileInputs;
    value_tiles_ = round_up(call.value_dim, kTileInputs) / kTileSide;
  }

  // Numbers that are kept of a row between two pieces.
  static int state_width(const TileCall& call) {
    return round_up(call.value_dim, kTileInputs) + 2;
  }

  int heads_at_once() const { return num_heads_; }  // KV heads in a group
  int query_tiles() const { return num_heads_ * query_tiles_; }  // of a group
  int query_tiles_of_head() const { return query_tiles_; }
  int value_tiles_of_head() const { return value_tiles_; }

  // Groups of the KV heads from `first_head` of the piece on.
  LaneGroup* begin(int first_head) { return &space_.groups[first_head / num_heads_ * num_groups_]; }
  LaneGroup* end(int first_head) { return begin(first_head) + num_groups_; }

  // The first key that any row sees.
  int first_key() const {
    int first = piece_.end;
    for (const LaneGroup& group : space_.groups) first = std::min(first, group.softmax.begin());
    return first;
  }

  void start() {
    const size_t num_groups = size_t(piece_.num_heads + num_heads_ - 1) / num_heads_ * num_groups_;
    space_.groups.resize(num_groups);
    space_.queries.resize(num_groups * query_tiles());
    const int value_tiles = num_heads_ * value_tiles_;
    space_.sums.assign(num_groups * value_tiles, TileSums{});
    for (size_t number = 0; number < num_groups; ++number) {
      const int in_set = number % num_groups_, is_second = in_set % 2;
      LaneGroup& group = space_.groups[number];
      group.together = (in_set | 1) < num_groups_ ? 2 : 1;
      group.sums = &space_.sums[(number - is_second) * value_tiles] + 2 * is_second;
      RightTile* queries = &space_.queries[number * query_tiles()];
      group.queries = queries;
      find_rows(group, number / num_groups_ * num_heads_, in_set * kTileSide);
      start_softmax(group);
      for (int tile = 0; tile < query_tiles(); ++tile) queries[tile] = query_tile(group, tile);
    }
  }

  // What was added up, row by row.
  void rescale(LaneGroup& group, __m512 factors) const {
    alignas(64) float by_lane[kTileSide];
    _mm512_store_ps(by_lane, factors);
    unsigned changed = _mm512_cmpneq_ps_mask(factors, _mm512_set1_ps(1));
    for (; changed != 0; changed &= changed - 1) {
      const int lane = __builtin_ctz(changed);
      const __m512 factor = _mm512_set1_ps(by_lane[lane]);
      TileSums* pair = group.sums + group.rows[lane].kv_head * value_tiles_ * group.together;
      for (int tile = 0; tile < value_tiles_; tile += 2, pair += 2 * group.together)
        for (TileSums* sums : {&pair[0], &pair[1]})
          sums->rows[lane] = _mm512_mul_ps(sums->rows[lane], factor);
    }
  }

  // Writes what came out, or how far it has come.
  void finish() {
    for (LaneGroup& group : space_.groups) {
      float largest[kTileSide], total[kTileSide];
      group.softmax.stop(largest, total);
      for (int lane = 0; lane < group.num_rows; ++lane)
        if (piece_.is_shared)
          keep(group, lane, largest[lane], total[lane]);
        else
          write(group, lane, 1 / total[lane]);
    }
  }

 private:
  void find_rows(LaneGroup& group, int first_head, int first_row) const {
    const int num_rows = std::min(num_heads_, piece_.num_heads - first_head) * piece_.num_rows;
    const bool are_many = piece_.requests.size() > 1;
    group.num_rows = std::min(kTileSide, num_rows - first_row);
    int kv_head = first_row / piece_.num_rows, row = first_row % piece_.num_rows;
    int query = (piece_.first_row + row) / call_.group, head = (piece_.first_row + row) % call_.group;
    for (int lane = 0; lane < group.num_rows; ++lane) {
      const int request = piece_.requests[are_many ? query : 0];
      group.rows[lane] = {
          kv_head, (piece_.first_head + first_head + kv_head) * call_.group + head, request,
          call_.row_starts[request] + (are_many ? 0 : query)};
      if (++head == call_.group) head = 0, ++query;
      if (++row < piece_.num_rows) continue;
      row = 0, ++kv_head;
      query = piece_.first_row / call_.group, head = piece_.first_row % call_.group;
    }
    std::fill(group.rows + group.num_rows, group.rows + kTileSide, group.rows[group.num_rows - 1]);
  }

  void start_softmax(LaneGroup& group) {
    int positions[kTileSide];
    float largest[kTileSide], total[kTileSide];
    for (int lane = 0; lane < kTileSide; ++lane) {
      const auto [kv_head, head, request, token] = group.rows[lane];
      positions[lane] = call_.context_lens[request] - (call_.row_starts[request + 1] - token);
      largest[lane] = RowsInLanes::kNothing;
      total[lane] = 0;
      if (piece_.begin > 0) {
        const float* from = states_.of(request, head);
        for (int tile = 0; tile < value_tiles_; ++tile, from += kTileSide)
          group.sums_of(kv_head * value_tiles_ + tile, lane) = _mm512_loadu_ps(from);
        largest[lane] = from[0], total[lane] = from[1];
      } else if (call_.sinks != nullptr) {
        // A sink is one more key with this score and no value.
        largest[lane] = call_.sinks[head] * kLog2E, total[lane] = 1;
      }
    }
    group.softmax.start(positions, call_.window, largest, total);
  }

  RightTile query_tile(const LaneGroup& group, int number) const {
    const int kv_head = number / query_tiles_, first = number % query_tiles_ * kTileInputs;
    RightTile tile;
    for (int lane = 0; lane < kTileSide; ++lane) {
      const LaneGroup::Row& row = group.rows[lane];
      const float* query = call_.query + row.token * call_.query_token + row.head * call_.query_head;
      tile.pairs[lane] = row.kv_head == kv_head ? scaled_row(query, first) : __m512i{};
    }
    transpose(tile.pairs);
    return tile;
  }

  __m512i scaled_row(const float* query, int at) const {
    const __m512 first = scaled(query, at), second = scaled(query, at + kTileSide);
    return (__m512i)_mm512_cvtne2ps_pbh(second, first);
  }

  __m512 scaled(const float* query, int at) const {
    const __m512 numbers = _mm512_maskz_loadu_ps(first_of_16(call_.head_dim - at), query + at);
    return _mm512_mul_ps(numbers, _mm512_set1_ps(call_.scale * kLog2E));
  }

  void keep(LaneGroup& group, int lane, float largest, float total) {
    const LaneGroup::Row& row = group.rows[lane];
    float* to = states_.of(row.request, row.head);
    for (int tile = 0; tile < value_tiles_; ++tile, to += kTileSide)
      _mm512_storeu_ps(to, group.sums_of(row.kv_head * value_tiles_ + tile, lane));
    to[0] = largest, to[1] = total;
  }

  void write(LaneGroup& group, int lane, float by) {
    const LaneGroup::Row& row = group.rows[lane];
    const __m512 factor = _mm512_set1_ps(by);
    float* to = call_.output + (int64_t(row.token) * call_.num_heads + row.head) * call_.value_dim;
    for (int d = 0; d < call_.value_dim; d += kTileInputs) {
      const int tile = row.kv_head * value_tiles_ + d / kTileSide;
      const __m512 fours = _mm512_mul_ps(group.sums_of(tile, lane), factor);
      const __m512 others = _mm512_mul_ps(group.sums_of(tile + 1, lane), factor);
      for (int half : {0, 1}) {
        const int first = d + half * kTileSide;
        _mm512_mask_storeu_ps(
            to + first, first_of_16(call_.value_dim - first),
            _mm512_permutex2var_ps(fours, in_turn(8 * half), others));
      }
    }
  }

  // Four numbers of one vector from `first` on, four of another, the next four of the one, ...
  static __m512i in_turn(int first) {
    const __m512i places =
        _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    return _mm512_add_epi32(places, _mm512_set1_epi32(first));
  }

  const TileCall& call_;
  RowStates& states_;
  Space& space_;
  const TilePiece& piece_;
  int num_heads_, num_groups_;        // of a group, of the same heads
  int query_tiles_, value_tiles_;     // of a head
};

}  // namespace relevo
#endif
