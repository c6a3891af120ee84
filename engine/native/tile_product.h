// Products of small matrices that lie in the cache of one core.
#pragma once

#include <algorithm>

#include "lanes.h"

namespace relevo {

constexpr int kTileRows = 6;   // rows of the left matrix kept in registers at once
constexpr int kTileLanes = 2;  // vectors of the right matrix beside them

// Nothing is fetched beside a product.
struct NotFetching {
  void fetch(int) const {}
  void advance(int) const {}
};

// Memory that is fetched, a quarter of a line a step, beside products that do not need it yet.
class Fetching {
 public:
  Fetching(const void* begin, const void* end)
      : next_(static_cast<const char*>(begin)), end_(static_cast<const char*>(end)) {}

  void fetch(int step) const { __builtin_prefetch(next_ + kBytesPerStep * step, 0, 2); }
  void advance(int steps) { next_ = std::min(next_ + kBytesPerStep * steps, end_); }

 private:
  static constexpr int kBytesPerStep = 16;
  const char *next_, *end_;
};

// c[rows, columns] (+)= a[rows, inner] * b[inner, columns], for `rows` <= kTileRows and as many
// columns as kTileLanes vectors hold.
template <typename acc_t, int rows, int lanes, typename ahead_t>
inline void product_in_registers(
    const acc_t* a, int a_stride, const acc_t* b, int b_stride, acc_t* c, int c_stride, int inner,
    bool adds, ahead_t& ahead) {
  using V = typename Lanes<acc_t>::type;
  constexpr int width = Lanes<acc_t>::count;
  V total[rows][lanes];
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 8
    for (int l = 0; l < lanes; ++l) total[r][l] = V{};
  for (int k = 0; k < inner; ++k) {
    ahead.fetch(k);
    V right[lanes];
#pragma GCC unroll 8
    for (int l = 0; l < lanes; ++l) right[l] = load(b + k * b_stride + l * width);
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
      const acc_t left = a[r * a_stride + k];
#pragma GCC unroll 8
      for (int l = 0; l < lanes; ++l) total[r][l] = add_in_order(total[r][l], left * right[l]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 8
    for (int l = 0; l < lanes; ++l) {
      acc_t* to = c + r * c_stride + l * width;
      store(to, adds ? add_in_order(load(to), total[r][l]) : total[r][l]);
    }
  ahead.advance(inner);
}

template <typename acc_t, int lanes, int rows = kTileRows, typename ahead_t>
inline void product_of_rows(
    int num_rows, const acc_t* a, int a_stride, const acc_t* b, int b_stride, acc_t* c,
    int c_stride, int inner, bool adds, ahead_t& ahead) {
  if (num_rows == rows) {
    product_in_registers<acc_t, rows, lanes>(
        a, a_stride, b, b_stride, c, c_stride, inner, adds, ahead);
  } else if constexpr (rows > 1) {
    product_of_rows<acc_t, lanes, rows - 1>(
        num_rows, a, a_stride, b, b_stride, c, c_stride, inner, adds, ahead);
  }
}

// c[rows, columns] (+)= a[rows, inner] * b[inner, columns]; all row-major, `columns` a multiple of
// the vectors' width.
template <typename acc_t, typename ahead_t>
void tile_product(
    const acc_t* a, int a_stride, const acc_t* b, int b_stride, acc_t* c, int c_stride, int rows,
    int inner, int columns, bool adds, ahead_t& ahead) {
  constexpr int width = Lanes<acc_t>::count;
  for (int j = 0; j < columns; j += kTileLanes * width) {
    const bool is_full = columns - j >= kTileLanes * width;
    int num_rows = 0;
    for (int i = 0; i < rows; i += num_rows) {
      // 16 are 6, 5 and 5, not 6, 6 and 4: a few rows alone keep the core waiting for each sum.
      const int num_left = (rows - i + kTileRows - 1) / kTileRows;
      num_rows = (rows - i + num_left - 1) / num_left;
      const acc_t* left = a + i * a_stride;
      acc_t* to = c + i * c_stride + j;
      if (is_full)
        product_of_rows<acc_t, kTileLanes>(
            num_rows, left, a_stride, b + j, b_stride, to, c_stride, inner, adds, ahead);
      else
        product_of_rows<acc_t, 1>(
            num_rows, left, a_stride, b + j, b_stride, to, c_stride, inner, adds, ahead);
    }
  }
}

template <typename acc_t>
void tile_product(
    const acc_t* a, int a_stride, const acc_t* b, int b_stride, acc_t* c, int c_stride, int rows,
    int inner, int columns, bool adds) {
  NotFetching none;
  tile_product(a, a_stride, b, b_stride, c, c_stride, rows, inner, columns, adds, none);
}

}  // namespace relevo
