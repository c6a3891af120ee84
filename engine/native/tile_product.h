// Products of small matrices that lie in the cache of one core.
#pragma once

#include "lanes.h"

namespace relevo {

constexpr int kTileRows = 6;   // rows of the left matrix kept in registers at once
constexpr int kTileLanes = 2;  // vectors of the right matrix beside them

// c[rows, columns] (+)= a[rows, inner] * b[inner, columns], for `rows` <= kTileRows and as many
// columns as kTileLanes vectors hold.
template <typename acc_t, int rows, int lanes>
inline void product_in_registers(
    const acc_t* a, int a_stride, const acc_t* b, int b_stride, acc_t* c, int c_stride, int inner,
    bool adds) {
  using V = typename Lanes<acc_t>::type;
  constexpr int width = Lanes<acc_t>::count;
  V total[rows][lanes];
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 8
    for (int l = 0; l < lanes; ++l) total[r][l] = adds ? load(c + r * c_stride + l * width) : V{};
  for (int k = 0; k < inner; ++k) {
    V right[lanes];
#pragma GCC unroll 8
    for (int l = 0; l < lanes; ++l) right[l] = load(b + k * b_stride + l * width);
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
      const acc_t left = a[r * a_stride + k];
#pragma GCC unroll 8
      for (int l = 0; l < lanes; ++l) total[r][l] += left * right[l];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 8
    for (int l = 0; l < lanes; ++l) store(c + r * c_stride + l * width, total[r][l]);
}

template <typename acc_t, int lanes, int rows = kTileRows>
inline void product_of_rows(
    int num_rows, const acc_t* a, int a_stride, const acc_t* b, int b_stride, acc_t* c,
    int c_stride, int inner, bool adds) {
  if (num_rows == rows) {
    product_in_registers<acc_t, rows, lanes>(a, a_stride, b, b_stride, c, c_stride, inner, adds);
  } else if constexpr (rows > 1) {
    product_of_rows<acc_t, lanes, rows - 1>(
        num_rows, a, a_stride, b, b_stride, c, c_stride, inner, adds);
  }
}

// c[rows, columns] (+)= a[rows, inner] * b[inner, columns]; all row-major, `columns` a multiple of
// the vectors' width.
template <typename acc_t>
void tile_product(
    const acc_t* a, int a_stride, const acc_t* b, int b_stride, acc_t* c, int c_stride, int rows,
    int inner, int columns, bool adds) {
  constexpr int width = Lanes<acc_t>::count;
  for (int j = 0; j < columns; j += kTileLanes * width) {
    const bool is_full = columns - j >= kTileLanes * width;
    for (int i = 0; i < rows; i += kTileRows) {
      const int num_rows = rows - i < kTileRows ? rows - i : kTileRows;
      if (is_full)
        product_of_rows<acc_t, kTileLanes>(
            num_rows, a + i * a_stride, a_stride, b + j, b_stride, c + i * c_stride + j, c_stride,
            inner, adds);
      else
        product_of_rows<acc_t, 1>(
            num_rows, a + i * a_stride, a_stride, b + j, b_stride, c + i * c_stride + j, c_stride,
            inner, adds);
    }
  }
}

}  // namespace relevo
