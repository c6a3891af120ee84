// One piece of work is a few queries of one request: of a chunk those that share one KV head, of as
// many tokens as keep the scores in the core's cache; of a decoding request the one token with
// several KV heads, which lie side by side in memory. Keys go by in tiles; softmax is carried along
// (running maximum and sum), so no score is kept for longer than its tile. Sums are made in float
// (in double for double), in an order that depends on the request's own tokens alone.

#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "lanes.h"
#include "products_in_place.h"
#include "tile_product.h"

namespace relevo {

constexpr int kKeysPerTile = 64;

struct Piece {
  int row;  // of the batch
  int first_head, num_heads;  // KV heads
  int first_query, num_queries;  // within the row
};

// Everything about the call; tensors as raw memory.
template <typename scalar_t, typename cache_t>
struct Call {
  const scalar_t* query;  // [tokens, heads, head_dim], strides below
  int64_t query_token, query_head;
  scalar_t* output;  // [tokens, heads, value_dim], contiguous
  cache_t* cache;    // [blocks, layers, 2, block_size, kv_heads, cache_dim], at this layer's keys
  int64_t block_stride, plane_stride, token_stride, head_stride;
  const int32_t* block_table;  // [rows, max_blocks]
  const int32_t* row_starts;   // [rows + 1]
  const int32_t* context_lens; // [rows], own tokens included
  const acc_type<scalar_t>* sinks;  // [heads] or null
  int max_blocks, block_size, num_heads, group, head_dim, value_dim, window;
  acc_type<scalar_t> scale, softcap;

  cache_t* slot(int row, int position, int plane, int kv_head) const {
    const int64_t block = block_table[int64_t(row) * max_blocks + position / block_size];
    return cache + block * block_stride + plane * plane_stride +
        (position % block_size) * token_stride + kv_head * head_stride;
  }
};

template <typename scalar_t, typename cache_t>
class PieceRun {
 public:
  using acc_t = acc_type<scalar_t>;

  // Queries times heads that share a KV head; up to the few, keys are not worth a copy.
  static constexpr int kRowsPerPiece = 96, kFewRows = 8;

  // Memory of one thread, reused from piece to piece.
  struct Space {
    Numbers<acc_t> query, keys, values, scores, output, largest, total, line;
  };

  PieceRun(const Call<scalar_t, cache_t>& call, Space& space, const Piece& piece)
      : call_(call), space_(space), piece_(piece) {
    rows_per_head_ = piece.num_queries * call.group;
    rows_ = rows_per_head_ * piece.num_heads;
    query_width_ = round_up(call.head_dim, Lanes<acc_t>::count);
    value_width_ = round_up(call.value_dim, Lanes<acc_t>::count);
    const int num_own = call.row_starts[piece.row + 1] - call.row_starts[piece.row];
    first_position_ = call.context_lens[piece.row] - num_own + piece.first_query;
  }

  void run() {
    start();
    const int end = first_position_ + piece_.num_queries;
    int begin = 0;
    if (call_.window > 0) begin = std::max(0, first_position_ - call_.window + 1);
    // Tiles start at multiples, so that a position's tile does not depend on the piece.
    for (int tile = begin / kKeysPerTile * kKeysPerTile; tile < end; tile += kKeysPerTile)
      attend(std::max(tile, begin), std::min(tile + kKeysPerTile, end));
    finish();
  }

 private:
  void start() {
    space_.query.assign(size_t(rows_) * query_width_, 0);
    space_.output.assign(size_t(rows_) * value_width_, 0);
    space_.scores.resize(size_t(rows_) * kKeysPerTile);
    space_.largest.assign(rows_, -std::numeric_limits<acc_t>::max());
    space_.total.assign(rows_, 0);
    for (int r = 0; r < rows_; ++r) {
      const int head = head_of(r);
      const scalar_t* from =
          call_.query + token_of(r) * call_.query_token + head * call_.query_head;
      widen<scalar_t, acc_t>(from, query_of(r), call_.head_dim, call_.scale);
      if (call_.sinks != nullptr) {
        // A sink is one more key with this score and no value.
        space_.largest[r] = call_.sinks[head];
        space_.total[r] = 1;
      }
    }
  }

  // Row -> head, token of the batch, place in the workspace. Rows of a KV head follow each other.
  int head_of(int r) const {
    return (piece_.first_head + r / rows_per_head_) * call_.group + r % call_.group;
  }
  int query_number_of(int r) const { return r % rows_per_head_ / call_.group; }
  int64_t token_of(int r) const {
    return call_.row_starts[piece_.row] + piece_.first_query + query_number_of(r);
  }
  acc_t* query_of(int r) { return &space_.query[size_t(r) * query_width_]; }
  acc_t* scores_of(int r) { return &space_.scores[size_t(r) * kKeysPerTile]; }
  acc_t* output_of(int r) { return &space_.output[size_t(r) * value_width_]; }

  void attend(int begin, int end) {
    const bool in_place = rows_per_head_ <= kFewRows;
    if (in_place)
      score_in_place(begin, end);
    else
      score_copied(begin, end);
    for (int r = 0; r < rows_; ++r) weigh(r, begin, end - begin);
    if (in_place)
      add_in_place(begin, end);
    else
      add_copied(begin, end);
  }

  // Runs of keys that lie in one block: function(first position, number).
  template <typename function_t>
  void for_runs(int begin, int end, function_t&& function) const {
    while (begin < end) {
      const int left = call_.block_size - begin % call_.block_size;
      const int count = std::min(left, end - begin);
      function(begin, count);
      begin += count;
    }
  }

  // Rows that share a KV head, at most four at a time: function(head, first row, number of rows).
  template <typename function_t>
  void for_heads(function_t&& function) const {
    for (int head = 0; head < piece_.num_heads; ++head)
      for (int r = 0; r < rows_per_head_; r += 4)
        with_rows(std::min(4, rows_per_head_ - r), [&](auto rows) {
          function(piece_.first_head + head, head * rows_per_head_ + r, rows);
        });
  }

  // What is fetched while a run of keys or values is multiplied: the run that comes after it.
  LinesAhead ahead_of(int begin, int end, int position, int count, int plane) const {
    int next = position + count, next_plane = plane;
    if (next >= end && plane == 0) next = begin, next_plane = 1;
    else if (next >= end) next_plane = 0;  // keys of the tile that follows
    const int num_left = first_position_ + piece_.num_queries - next;
    const int next_count =
        std::min(num_left, call_.block_size - next % call_.block_size);
    if (next_count <= 0) return LinesAhead(nullptr, 0, 0, 0);
    return LinesAhead(
        call_.slot(piece_.row, next, next_plane, piece_.first_head), next_count,
        piece_.num_heads * call_.head_stride * sizeof(cache_t),
        call_.token_stride * sizeof(cache_t));
  }

  void score_in_place(int begin, int end) {
    for_runs(begin, end, [&](int position, int count) {
      LinesAhead ahead = ahead_of(begin, end, position, count, 0);
      for_heads([&](int head, int r, auto rows) {
        scores_in_place<rows()>(
            query_of(r), query_width_, call_.slot(piece_.row, position, 0, head),
            call_.token_stride, count, call_.head_dim, scores_of(r) + position - begin,
            kKeysPerTile, ahead);
      });
    });
  }

  void add_in_place(int begin, int end) {
    for_runs(begin, end, [&](int position, int count) {
      LinesAhead ahead = ahead_of(begin, end, position, count, 1);
      for_heads([&](int head, int r, auto rows) {
        values_in_place<rows()>(
            scores_of(r) + position - begin, kKeysPerTile,
            call_.slot(piece_.row, position, 1, head), call_.token_stride, count,
            call_.value_dim, output_of(r), value_width_, ahead);
      });
    });
  }

  // Keys are turned on their side, [head_dim, keys], so that scores come out in vectors.
  void score_copied(int begin, int end) {
    space_.keys.resize(size_t(query_width_) * kKeysPerTile);
    space_.values.resize(size_t(kKeysPerTile) * value_width_);
    Numbers<acc_t>& line = space_.line;
    line.resize(query_width_);
    for_runs(begin, end, [&](int position, int count) {
      const cache_t* keys = call_.slot(piece_.row, position, 0, piece_.first_head);
      const cache_t* values = call_.slot(piece_.row, position, 1, piece_.first_head);
      for (int j = 0; j < count; ++j) {
        widen<cache_t, acc_t>(keys + j * call_.token_stride, line.data(), call_.head_dim);
        acc_t* column = &space_.keys[position - begin + j];
        for (int d = 0; d < call_.head_dim; ++d) column[size_t(d) * kKeysPerTile] = line[d];
        acc_t* value = &space_.values[size_t(position - begin + j) * value_width_];
        widen<cache_t, acc_t>(values + j * call_.token_stride, value, call_.value_dim);
        for (int d = call_.value_dim; d < value_width_; ++d) value[d] = 0;
      }
    });
    const int num_keys = end - begin;
    const int columns = round_up(num_keys, Lanes<acc_t>::count);
    for (int d = 0; d < call_.head_dim; ++d)
      for (int j = num_keys; j < columns; ++j) space_.keys[size_t(d) * kKeysPerTile + j] = 0;
    tile_product<acc_t>(
        space_.query.data(), query_width_, space_.keys.data(), kKeysPerTile, space_.scores.data(),
        kKeysPerTile, rows_, call_.head_dim, columns, false);
  }

  void add_copied(int begin, int end) {
    tile_product<acc_t>(
        space_.scores.data(), kKeysPerTile, space_.values.data(), value_width_,
        space_.output.data(), value_width_, rows_, end - begin, value_width_, true);
  }

  // Scores -> weights relative to the largest score so far; what came before is scaled to it.
  void weigh(int r, int begin, int num_keys) {
    acc_t* scores = scores_of(r);
    const int position = first_position_ + query_number_of(r);
    const int visible_end = std::min(num_keys, position + 1 - begin);
    int visible_begin = 0;
    if (call_.window > 0) visible_begin = std::max(0, position - call_.window + 1 - begin);
    if (visible_begin >= visible_end) {
      for (int j = 0; j < num_keys; ++j) scores[j] = 0;
      return;
    }
    if (call_.softcap > 0) {
      const acc_t cap = call_.softcap;
      for (int j = visible_begin; j < visible_end; ++j) scores[j] = std::tanh(scores[j] / cap) * cap;
    }
    acc_t largest = space_.largest[r];
    for (int j = visible_begin; j < visible_end; ++j) largest = std::max(largest, scores[j]);
    acc_t total = 0;
    for (int j = 0; j < visible_begin; ++j) scores[j] = 0;
    for (int j = visible_begin; j < visible_end; ++j) {
      scores[j] = std::exp(scores[j] - largest);
      total += scores[j];
    }
    for (int j = visible_end; j < num_keys; ++j) scores[j] = 0;
    const acc_t before = std::exp(space_.largest[r] - largest);
    space_.largest[r] = largest;
    space_.total[r] = space_.total[r] * before + total;
    if (before != 1) {
      acc_t* output = output_of(r);
      for (int d = 0; d < value_width_; ++d) output[d] *= before;
    }
  }

  void finish() {
    for (int r = 0; r < rows_; ++r) {
      scalar_t* to = call_.output + (token_of(r) * call_.num_heads + head_of(r)) * call_.value_dim;
      const acc_t* output = output_of(r);
      const acc_t factor = 1 / space_.total[r];
      for (int d = 0; d < call_.value_dim; ++d) to[d] = static_cast<scalar_t>(output[d] * factor);
    }
  }

  const Call<scalar_t, cache_t>& call_;
  Space& space_;
  const Piece piece_;
  int rows_per_head_, rows_, query_width_, value_width_, first_position_;
};

}  // namespace relevo
