// A piece of attention over a bfloat16 cache by tiles: keys lie where they are as left tiles, queries
// are right tiles, so each row of the piece is a column. Weights are turned into left tiles, since
// values are right ones as soon as those of two keys alternate. Keys go by in stretches that start at
// multiples, and what a row does not see adds nothing: a row is computed alike whatever else is in its
// piece.
#pragma once

#include "attention_piece.h"
#include "tile_softmax.h"

#ifdef __AMX_BF16__
namespace relevo {

class TileRun {
 public:
  using Number = c10::BFloat16;
  using TileCall = Call<float, Number>;

  static constexpr int kRowsPerPiece = 96, kFewRows = kTileSide;
  static constexpr int kStretch = 64, kSteps = kStretch / kTileInputs;  // keys

  // Memory of one thread, reused from piece to piece, and its tiles.
  struct Space {
    TileUse use;
    Numbers<RowsInLanes> rows;   // [groups of 16]
    Numbers<RightTile> queries;  // [groups, head_dim / 32]
    Numbers<TileSums> output;    // [groups, value_dim / 32, 2]; of two groups next to each other
    Numbers<Number> keys;        // [stretch, head_dim] where they do not lie in tiles
    Numbers<RightTile> values;   // [value_dim / 16, steps]
    Numbers<Number> nothing;     // a value that is not there
    TileSums scores[2 * kSteps * 2];
    alignas(64) Number weights[2][kTileSide][kStretch];
  };

  static bool suits(const TileCall& call) {
    return call.head_dim % kTileInputs == 0 && call.head_stride % kTileInputs == 0 &&
        call.value_dim % kTileSide == 0 && may_use_tiles();
  }

  TileRun(const TileCall& call, Space& space, const Piece& piece)
      : call_(call), space_(space), piece_(piece) {
    rows_per_head_ = piece.num_queries * call.group;
    groups_per_head_ = round_up(rows_per_head_, kTileSide) / kTileSide;
    query_tiles_ = call.head_dim / kTileInputs;
    value_tiles_ = round_up(call.value_dim, kTileInputs) / kTileSide;
    const int num_own = call.row_starts[piece.row + 1] - call.row_starts[piece.row];
    first_position_ = call.context_lens[piece.row] - num_own + piece.first_query;
  }

  void run() {
    start();
    const int end = first_position_ + piece_.num_queries, begin = space_.rows[0].begin();
    for (int at = begin / kStretch * kStretch; at < end; at += kStretch) {
      find(at, std::max(at, begin), std::min(at + kStretch, end));
      for (int head = 0; head < piece_.num_heads; ++head) attend(at, head);
    }
    finish();
  }

 private:
  void start() {
    const int num_groups = groups_per_head_ * piece_.num_heads;
    space_.rows.resize(num_groups);
    space_.queries.resize(size_t(num_groups) * query_tiles_);
    space_.output.assign(size_t(num_groups) * value_tiles_, TileSums{});
    space_.keys.resize(size_t(kStretch) * call_.head_dim);
    space_.values.resize(size_t(value_tiles_) * kSteps);
    space_.nothing.resize(call_.token_stride);
    for (int group = 0; group < num_groups; ++group) start(group);
  }

  void start(int group) {
    int positions[kTileSide];
    float sinks[kTileSide];
    const float* queries[kTileSide];
    for (int lane = 0; lane < kTileSide; ++lane) {
      // Behind the last row stands that one again.
      const int row = std::min(row_of(group, lane), rows_per_head_ - 1), head = head_of(group, row);
      positions[lane] = first_position_ + row / call_.group;
      queries[lane] = call_.query + token_of(row) * call_.query_token + head * call_.query_head;
      if (call_.sinks != nullptr) sinks[lane] = call_.sinks[head] * kLog2E;
    }
    space_.rows[group].start(positions, call_.window);
    if (call_.sinks != nullptr) space_.rows[group].start_from(sinks);
    for (int tile = 0; tile < query_tiles_; ++tile) {
      __m512i rows[kTileSide];
      for (int lane = 0; lane < kTileSide; ++lane)
        rows[lane] = scaled_row(queries[lane] + tile * kTileInputs, call_.scale * kLog2E);
      transpose(rows);
      std::memcpy(&space_.queries[group * query_tiles_ + tile], rows, sizeof(rows));
    }
  }

  static __m512i scaled_row(const float* from, float factor) {
    alignas(64) float scaled[kTileInputs];
    for (int i = 0; i < kTileInputs; ++i) scaled[i] = from[i] * factor;
    return rounded_row(scaled);
  }

  // Rows of one KV head, 16 to a group; group and row within the head -> head, token of the batch.
  int row_of(int group, int lane) const { return group % groups_per_head_ * kTileSide + lane; }
  int head_of(int group, int row) const {
    return (piece_.first_head + group / groups_per_head_) * call_.group + row % call_.group;
  }
  int64_t token_of(int row) const {
    return call_.row_starts[piece_.row] + piece_.first_query + row / call_.group;
  }

  // Where the keys and values of the piece's first head lie. Only positions from `begin` to `end`
  // are sure to be there; a key in the place of one that is not is hidden from every row.
  void find(int at, int begin, int end) {
    for (int i = 0; i < kStretch; ++i) keys_[i] = values_[i] = space_.nothing.data();
    for (int position = begin; position < end;) {
      const Number* key = call_.slot(piece_.row, position, 0, piece_.first_head);
      const int left = call_.block_size - position % call_.block_size;
      for (const int stop = std::min(end, position + left); position < stop; ++position) {
        keys_[position - at] = key;
        values_[position - at] = key + call_.plane_stride;
        key += call_.token_stride;
      }
    }
    if (call_.block_size % kTileSide != 0) return;
    for (int tile = 0; tile < kStretch; tile += kTileSide) {
      const int seen = std::clamp(at + tile, begin, end - 1);
      keys_[tile] = call_.slot(piece_.row, seen / kTileSide * kTileSide, 0, piece_.first_head);
    }
  }

  void attend(int at, int head) {
    const int64_t offset = head * call_.head_stride;
    pair_values(offset);
    if (call_.block_size % kTileSide != 0) copy_keys(offset);
    const int begin = head * groups_per_head_, end = begin + groups_per_head_;
    for (int group = begin; group + 2 <= end; group += 2) attend<2>(at, offset, group);
    if (groups_per_head_ % 2 != 0) attend<1>(at, offset, end - 1);
  }

  void copy_keys(int64_t offset) {
    for (int key = 0; key < kStretch; ++key)
      std::copy_n(keys_[key] + offset, call_.head_dim, &space_.keys[size_t(key) * call_.head_dim]);
  }

  // 32 numbers of each value go to two tiles: of each eight the first four, and the others.
  void pair_values(int64_t offset) {
    for (int key = 0; key < kStretch; key += 2) {
      const Number *first = values_[key] + offset, *second = values_[key + 1] + offset;
      RightTile* to = &space_.values[key / kTileInputs];
      const int pair = key % kTileInputs / 2;
      for (int tile = 0; tile < value_tiles_; tile += 2) {
        const __m512i even = _mm512_loadu_si512(first + tile * kTileSide);
        const __m512i odd = _mm512_loadu_si512(second + tile * kTileSide);
        to[tile * kSteps].pairs[pair] = _mm512_unpacklo_epi16(even, odd);
        to[(tile + 1) * kSteps].pairs[pair] = _mm512_unpackhi_epi16(even, odd);
      }
    }
  }

  // One or two groups with those keys of the stretch that they see.
  template <int groups>
  void attend(int at, int64_t offset, int group) {
    RowsInLanes* rows = &space_.rows[group];
    const int begin = std::max(0, rows[0].begin() - at) / kTileInputs;
    const int end =
        round_up(std::min(kStretch, rows[groups - 1].end() - at), kTileInputs) / kTileInputs;
    if (begin >= end) return;
    for (int step = begin; step < end; ++step) score<groups>(step, offset, group);
    const int begin_key = begin * kTileInputs;
    TileSums* output = &space_.output[size_t(group) * value_tiles_];
    for (int g = 0; g < groups; ++g) {
      const __m512 before = rows[g].template weigh<groups>(
          space_.scores + 2 * begin * groups + g, at + begin_key, end - begin,
          call_.softcap * kLog2E, &space_.weights[g][0][begin_key], kStretch);
      rescale<groups>(output + 2 * g, before);
    }
    const Number* weights[groups];
    for (int g = 0; g < groups; ++g) weights[g] = &space_.weights[g][0][begin_key];
    for (int tile = 0; tile < value_tiles_; tile += 2)
      multiply_tiles<groups, 2, true>(
          weights, kStretch, &space_.values[tile * kSteps + begin], kSteps, end - begin,
          output + tile * groups);
  }

  template <int groups>
  void score(int step, int64_t offset, int group) {
    const RightTile* queries = &space_.queries[group * query_tiles_];
    TileSums* scores = space_.scores + 2 * step * groups;
    const int first = step * kTileInputs, second = first + kTileSide;
    if (call_.block_size % kTileSide == 0) {
      const Number* both[2] = {keys_[first] + offset, keys_[second] + offset};
      multiply_tiles<2, groups>(
          both, call_.token_stride, queries, query_tiles_, query_tiles_, scores);
    } else {
      const Number* both[2] = {
          &space_.keys[first * call_.head_dim], &space_.keys[second * call_.head_dim]};
      multiply_tiles<2, groups>(both, call_.head_dim, queries, query_tiles_, query_tiles_, scores);
    }
  }

  template <int groups>
  void rescale(TileSums* output, __m512 factors) {
    alignas(64) float by_row[kTileSide];
    _mm512_store_ps(by_row, factors);
    unsigned changed = _mm512_cmpneq_ps_mask(factors, _mm512_set1_ps(1));
    for (; changed != 0; changed &= changed - 1) {
      const int row = __builtin_ctz(changed);
      const __m512 factor = _mm512_set1_ps(by_row[row]);
      for (int tile = 0; tile < value_tiles_; tile += 2)
        for (int i = 0; i < 2; ++i) {
          __m512& sums = output[tile * groups + i].rows[row];
          sums = _mm512_mul_ps(sums, factor);
        }
    }
  }

  void finish() {
    for (int head = 0; head < piece_.num_heads; ++head)
      for (int group = 0; group < groups_per_head_; ++group) {
        const bool is_paired = (group | 1) < groups_per_head_;
        const int place = is_paired ? group & 1 : 0;
        const size_t first = size_t(head) * groups_per_head_ + group - place;
        const TileSums* output = &space_.output[first * value_tiles_ + 2 * place];
        finish(head * groups_per_head_ + group, output, is_paired ? 2 : 1);
      }
  }

  void finish(int group, const TileSums* output, int groups) {
    const int num_rows = std::min(kTileSide, rows_per_head_ - row_of(group, 0));
    alignas(64) float factors[kTileSide];
    _mm512_store_ps(factors, _mm512_div_ps(_mm512_set1_ps(1), space_.rows[group].total()));
    for (int lane = 0; lane < num_rows; ++lane) {
      const int row = row_of(group, lane);
      const __m512 factor = _mm512_set1_ps(factors[lane]);
      float* to =
          call_.output + (token_of(row) * call_.num_heads + head_of(group, row)) * call_.value_dim;
      for (int d = 0; d < call_.value_dim; d += kTileInputs) {
        const TileSums* both = output + d / kTileSide * groups;
        const __m512 fours = _mm512_mul_ps(both[0].rows[lane], factor);
        const __m512 others = _mm512_mul_ps(both[1].rows[lane], factor);
        _mm512_storeu_ps(to + d, _mm512_permutex2var_ps(fours, in_turn(0), others));
        if (d + kTileSide < call_.value_dim)
          _mm512_storeu_ps(to + d + kTileSide, _mm512_permutex2var_ps(fours, in_turn(8), others));
      }
    }
  }

  // Four numbers of one vector from `first` on, four of another, the next four of the one, ...
  static __m512i in_turn(int first) {
    const __m512i places =
        _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    return _mm512_add_epi32(places, _mm512_set1_epi32(first));
  }

  static constexpr float kLog2E = 1.44269504f;

  const TileCall& call_;
  Space& space_;
  const Piece piece_;
  int rows_per_head_, groups_per_head_, query_tiles_, value_tiles_, first_position_;
  const Number *keys_[kStretch], *values_[kStretch];  // of the piece's first head
};

}  // namespace relevo
#endif
