// Products of a few query rows with keys and values where they lie in the KV cache.
#pragma once

#include "lanes.h"

namespace relevo {

template <typename scalar_t, typename acc_t>
inline void widen(const scalar_t* from, acc_t* to, int count, acc_t factor = 1) {
  constexpr int width = Lanes<acc_t>::count;
  int i = 0;
  for (; i + width <= count; i += width) store(to + i, load(from + i) * factor);
  for (; i < count; ++i) to[i] = static_cast<acc_t>(from[i]) * factor;
}

// Keys or values that are needed next, fetched line by line in the order in which they lie: the core
// itself does not see through heads of a token that lie between others.
class LinesAhead {
 public:
  // `count` tokens of which `bytes` each are wanted, `stride` bytes apart.
  LinesAhead(const void* begin, int count, int64_t bytes, int64_t stride)
      : line_(static_cast<const char*>(begin)),
        end_(line_ + bytes),
        bytes_(bytes),
        stride_(stride),
        tokens_left_(count) {}

  void fetch() {
    if (tokens_left_ <= 0) return;
    __builtin_prefetch(line_);
    line_ += kLine;
    if (line_ < end_) return;
    --tokens_left_;
    end_ += stride_;
    line_ = end_ - bytes_;
  }

  template <typename scalar_t>
  void fetch(int num_numbers) {
    for (int i = 0; i < num_numbers * int(sizeof(scalar_t)); i += kLine) fetch();
  }

 private:
  static constexpr int kLine = 64;
  const char *line_, *end_;
  int64_t bytes_, stride_;
  int tokens_left_;
};

// scores[row][key] of up to four query rows against keys where they lie.
template <int rows, typename scalar_t, typename acc_t>
inline void scores_in_place(
    const acc_t* query, int query_stride, const scalar_t* keys, int64_t key_stride, int num_keys,
    int head_dim, acc_t* scores, int score_stride, LinesAhead& ahead) {
  using V = typename Lanes<acc_t>::type;
  constexpr int width = Lanes<acc_t>::count;
  for (int j = 0; j < num_keys; ++j) {
    const scalar_t* key = keys + j * key_stride;
    ahead.fetch<scalar_t>(head_dim);
    V total[rows] = {};
    int d = 0;
    for (; d + width <= head_dim; d += width) {
      const V lanes = load(key + d);
#pragma GCC unroll 4
      for (int r = 0; r < rows; ++r) total[r] += load(query + r * query_stride + d) * lanes;
    }
    acc_t rest[rows];
    for (int r = 0; r < rows; ++r) rest[r] = sum(total[r]);
    for (; d < head_dim; ++d)
      for (int r = 0; r < rows; ++r)
        rest[r] += query[r * query_stride + d] * static_cast<acc_t>(key[d]);
    for (int r = 0; r < rows; ++r) scores[r * score_stride + j] = rest[r];
  }
}

// output[row][d] += scores[row][key] * value[key][d] of up to four rows, values where they lie.
template <int rows, typename scalar_t, typename acc_t>
inline void values_in_place(
    const acc_t* scores, int score_stride, const scalar_t* values, int64_t value_stride,
    int num_keys, int value_dim, acc_t* output, int output_stride, LinesAhead& ahead) {
  using V = typename Lanes<acc_t>::type;
  constexpr int width = Lanes<acc_t>::count;
  constexpr int lanes = 2;
  int d = 0;
  for (; d + lanes * width <= value_dim; d += lanes * width) {
    V total[rows][lanes];
    for (int r = 0; r < rows; ++r)
      for (int l = 0; l < lanes; ++l) total[r][l] = load(output + r * output_stride + d + l * width);
    for (int j = 0; j < num_keys; ++j) {
      const scalar_t* value = values + j * value_stride + d;
      ahead.fetch<scalar_t>(lanes * width);
      const V first = load(value), second = load(value + width);
#pragma GCC unroll 4
      for (int r = 0; r < rows; ++r) {
        const acc_t weight = scores[r * score_stride + j];
        total[r][0] += weight * first;
        total[r][1] += weight * second;
      }
    }
    for (int r = 0; r < rows; ++r)
      for (int l = 0; l < lanes; ++l) store(output + r * output_stride + d + l * width, total[r][l]);
  }
  for (; d < value_dim; ++d)
    for (int j = 0; j < num_keys; ++j)
      for (int r = 0; r < rows; ++r)
        output[r * output_stride + d] +=
            scores[r * score_stride + j] * static_cast<acc_t>(values[j * value_stride + d]);
}

template <int rows = 4, typename function_t>
inline void with_rows(int num_rows, function_t&& function) {
  if (num_rows == rows)
    function(std::integral_constant<int, rows>{});
  else if constexpr (rows > 1)
    with_rows<rows - 1>(num_rows, function);
}

}  // namespace relevo
