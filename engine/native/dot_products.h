// Rows of bfloat16 numbers times rows, added up in float32, for CPUs and processes without tiles.
//
// A sum is made in 16 parts, each from the first inputs to the last, which are then added in one
// order, whatever stands in the other rows: a token is computed alike alone, in a batch and in a
// prompt.
#pragma once

#include <c10/util/BFloat16.h>

#include "lanes.h"
#include "tile_shapes.h"

#ifdef __AVX512BF16__

namespace relevo {

// The sums over the lanes of each.
inline __m512 sum_each(__m512 (&parts)[16]) {
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2)
    parts[i] = add_in_order(
        _mm512_unpacklo_ps(parts[i], parts[i + 1]), _mm512_unpackhi_ps(parts[i], parts[i + 1]));
  __m512 quarters[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512d one = (__m512d)parts[4 * i], two = (__m512d)parts[4 * i + 2];
    quarters[i] = add_in_order(
        (__m512)_mm512_unpacklo_pd(one, two), (__m512)_mm512_unpackhi_pd(one, two));
  }
  const auto halve = [](__m512 one, __m512 two) {
    return add_in_order(_mm512_shuffle_f32x4(one, two, 0x88), _mm512_shuffle_f32x4(one, two, 0xdd));
  };
  return halve(halve(quarters[0], quarters[1]), halve(quarters[2], quarters[3]));
}

// sums[token][output] of some tokens: of 16 / tokens outputs at once, whose weights, `stride` numbers
// apart, are read for all tokens. Tokens are the rows of `num_tiles` tiles.
template <int tokens>
inline void multiply_rows(
    const c10::BFloat16* weight, int64_t stride, const __m512i* inputs, int num_tiles,
    int64_t ahead, __m512* sums) {
  constexpr int outputs = kTileSide / tokens;
  for (int first = 0; first < kTileSide; first += outputs, weight += outputs * stride) {
    __m512 parts[kTileSide] = {};
    for (int i = 0; i < num_tiles; ++i) {
      // A row is too short for the core to see the next ones coming: it is told line by line.
      if (ahead)
#pragma GCC unroll 16
        for (int line = 0; line < outputs; ++line)
          __builtin_prefetch(weight + ahead + (i * outputs + line) * kTileInputs);
      __m512i rows[outputs];
#pragma GCC unroll 16
      for (int output = 0; output < outputs; ++output)
        rows[output] = _mm512_loadu_si512(weight + output * stride + i * kTileInputs);
#pragma GCC unroll 4
      for (int token = 0; token < tokens; ++token) {
        const __m512i input = inputs[i * kTileSide + token];
#pragma GCC unroll 16
        for (int output = 0; output < outputs; ++output) {
          __m512& part = parts[token * outputs + output];
          part = _mm512_dpbf16_ps(part, (__m512bh)rows[output], (__m512bh)input);
        }
      }
    }
    const __m512 all = sum_each(parts);
#pragma GCC unroll 4
    for (int token = 0; token < tokens; ++token)
      std::memcpy(
          (float*)&sums[token] + first, (const float*)&all + token * outputs,
          outputs * sizeof(float));
  }
}

// kTileSide outputs of the first tokens of a group; as many weights as go by are fetched into the
// cache, `ahead` numbers behind them; 0: none.
inline void multiply_group(
    const c10::BFloat16* weight, int64_t stride, const RightTile* tiles, int num_tiles,
    int num_tokens, int64_t ahead, TileSums& sums) {
  for (int token = 0; token < num_tokens; token += 4, ahead = 0) {
    const __m512i* inputs = tiles->pairs + token;
    __m512* to = sums.rows + token;
    if (num_tokens - token == 1)
      multiply_rows<1>(weight, stride, inputs, num_tiles, ahead, to);
    else if (num_tokens - token == 2)
      multiply_rows<2>(weight, stride, inputs, num_tiles, ahead, to);
    else
      multiply_rows<4>(weight, stride, inputs, num_tiles, ahead, to);
  }
}

}  // namespace relevo
#endif
