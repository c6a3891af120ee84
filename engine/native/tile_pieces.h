// How attention by tiles is cut into pieces. A piece is some rows that see the same keys, a row being
// one head of one token. What several requests share goes first; each then goes on by itself from
// where its rows have come, in the order in which it would have gone alone, and so to the same bits.
#pragma once

#include <algorithm>
#include <vector>

#include "attention_piece.h"
#include "lanes.h"
#include "shared_prefix.h"

namespace relevo {

struct TilePiece {
  std::vector<int> requests;  // rows of the batch: one, or some with the same keys and one token each
  int first_head, num_heads;  // KV heads
  int first_row, num_rows;    // of those of each KV head
  int begin, end;             // keys
  bool is_shared;             // others follow
};

// How far the rows of requests with a shared prefix have come.
class RowStates {
 public:
  RowStates(int num_requests, int num_heads, int width)
      : ends_(num_requests), num_heads_(num_heads), width_(width) {}

  void share(const SharedPrefix& prefix) {
    if (numbers_.empty()) numbers_.resize(ends_.size() * num_heads_ * width_);
    for (const int request : prefix.rows) ends_[request] = prefix.end;
  }

  int end(int request) const { return ends_[request]; }  // keys seen already
  float* of(int request, int head) {
    return &numbers_[(size_t(request) * num_heads_ + head) * width_];
  }

 private:
  std::vector<int> ends_;
  int num_heads_, width_;
  Numbers<float> numbers_;
};

// Pieces of all KV heads, some at once where their rows are few, for one of `num_threads` each.
template <typename call_t>
class TilePieces {
 public:
  static constexpr int kMostRows = 192, kLeastRows = 32, kFewRows = 16;

  TilePieces(const call_t& call, int num_kv_heads, int num_threads)
      : call_(call), num_kv_heads_(num_kv_heads), num_threads_(num_threads) {}

  std::vector<TilePiece> of_prefixes(const std::vector<SharedPrefix>& prefixes) const {
    std::vector<TilePiece> pieces;
    for (const SharedPrefix& prefix : prefixes) {
      const int num_rows = prefix.rows.size() * call_.group;
      for (int first = 0; first < num_rows; first += kLeastRows)
        add({prefix.rows, 0, 0, first, std::min(kLeastRows, num_rows - first), 0, prefix.end, true},
            prefixes.size(), pieces);
    }
    return sorted(std::move(pieces));
  }

  std::vector<TilePiece> of_requests(int num_requests, const RowStates& states) const {
    std::vector<TilePiece> pieces;
    for (int request = 0; request < num_requests; ++request) {
      const int num_own = call_.row_starts[request + 1] - call_.row_starts[request];
      const int begin = states.end(request), before = call_.context_lens[request] - num_own;
      const int most = rows_at_once(num_own * call_.group);
      for (int first = 0, num_rows = 0; first < num_own * call_.group; first += num_rows) {
        num_rows = std::min(most, num_own * call_.group - first);
        const int end = before + (first + num_rows - 1) / call_.group + 1;
        add({{request}, 0, 0, first, num_rows, begin, end, false}, num_requests, pieces);
      }
    }
    return sorted(std::move(pieces));
  }

 private:
  // Of a request with so many for each KV head: many, unless that leaves threads without work.
  int rows_at_once(int num_rows) const {
    const int even = num_rows * num_kv_heads_ / (4 * num_threads_);
    return std::clamp(round_up(even, kLeastRows), kLeastRows, kMostRows);
  }

  // Few rows of several heads stay together, unless that leaves threads without work.
  void add(TilePiece piece, int num_others, std::vector<TilePiece>& pieces) const {
    const int num_pieces = std::max(1, 2 * num_threads_ / num_others);
    const int num_heads =
        piece.num_rows > kFewRows ? 1 : std::max(1, num_kv_heads_ / num_pieces);
    for (int head = 0; head < num_kv_heads_; head += num_heads) {
      piece.first_head = head;
      piece.num_heads = std::min(num_heads, num_kv_heads_ - head);
      pieces.push_back(piece);
    }
  }

  // Threads take them in turn: long ones first.
  static std::vector<TilePiece> sorted(std::vector<TilePiece> pieces) {
    const auto work = [](const TilePiece& piece) {
      return int64_t(piece.end - piece.begin) * piece.num_heads * round_up(piece.num_rows, kFewRows);
    };
    std::stable_sort(pieces.begin(), pieces.end(), [&](const TilePiece& one, const TilePiece& other) {
      return work(one) > work(other);
    });
    return pieces;
  }

  const call_t& call_;
  const int num_kv_heads_, num_threads_;
};

}  // namespace relevo
