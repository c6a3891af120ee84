// Rows of one token each whose block tables start alike: what they share is read once for all.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace relevo {

struct SharedPrefix {
  std::vector<int> rows;  // of the batch
  int end;                // positions before it lie in the same blocks for all of them
};

template <typename call_t>
class SharedPrefixes {
 public:
  // Prefixes end at multiples of `step`. Of all ways to share, the one that saves most reading.
  static std::vector<SharedPrefix> of(const call_t& call, int num_rows, int step) {
    SharedPrefixes found(call, num_rows, step);
    if (!found.rows_.empty()) found.split(0, found.rows_.size());
    return std::move(found.prefixes_);
  }

 private:
  SharedPrefixes(const call_t& call, int num_rows, int step) : call_(call) {
    for (int row = 0; row < num_rows; ++row)
      if (call.row_starts[row + 1] - call.row_starts[row] == 1) rows_.push_back(row);
    // Side by side those that share most.
    std::sort(rows_.begin(), rows_.end(), [&](int one, int other) {
      return std::lexicographical_compare(
          blocks(one), blocks(one) + num_full(one), blocks(other), blocks(other) + num_full(other));
    });
    for (size_t i = 1; i < rows_.size(); ++i) {
      const int *one = blocks(rows_[i - 1]), *other = blocks(rows_[i]);
      const auto [stop, _] =
          std::mismatch(one, one + num_full(rows_[i - 1]), other, other + num_full(rows_[i]));
      common_.push_back(int(stop - one) * call.block_size / step * step);
    }
  }

  const int32_t* blocks(int row) const {
    return call_.block_table + int64_t(row) * call_.max_blocks;
  }
  int num_full(int row) const { return call_.context_lens[row] / call_.block_size; }

  // Positions that need not be read again when these rows share as they should.
  int64_t split(size_t begin, size_t end) {
    if (end - begin == 1) return 0;
    const auto least = std::min_element(common_.begin() + begin, common_.begin() + end - 1);
    const size_t num_before = prefixes_.size(), middle = least - common_.begin() + 1;
    const int64_t together = *least * int64_t(end - begin - 1);
    const int64_t apart = split(begin, middle) + split(middle, end);
    if (together == 0 || together < apart) return apart;
    prefixes_.resize(num_before);
    prefixes_.push_back({{rows_.begin() + begin, rows_.begin() + end}, *least});
    return together;
  }

  const call_t& call_;
  std::vector<int> rows_, common_;  // of each row with the next
  std::vector<SharedPrefix> prefixes_;
};

}  // namespace relevo
