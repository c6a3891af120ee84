// Softmax of scores that come out of tiles: keys below each other, queries side by side, so that each
// lane of a vector is one row of the piece. Scores are logarithms to base 2.
#pragma once

#include <algorithm>
#include <limits>

#include "bfloat16_tiles.h"
#include "exponential.h"

#ifdef __AMX_BF16__
namespace relevo {

// Scores of tiles that are `stride` apart -> cap * tanh(score / cap), by 1 - 2 / (e^2x + 1). Compiled
// once: -ffast-math divides differently from place to place.
[[gnu::noinline]] inline void cap_softly(TileSums* scores, int num_tiles, int stride, float cap) {
  constexpr float kTwiceLog2E = 2.88539008f, kFlat = 40;  // tanh is 1 from there
  const __m512 one = _mm512_set1_ps(1), flat = _mm512_set1_ps(kFlat);
  for (int tile = 0; tile < num_tiles; ++tile)
    for (__m512& score : scores[tile * stride].rows) {
      const __m512 twice = _mm512_mul_ps(score, _mm512_set1_ps(kTwiceLog2E / cap));
      const __m512 power = power_of_two(
          _mm512_max_ps(_mm512_sub_ps(_mm512_setzero_ps(), flat), _mm512_min_ps(flat, twice)));
      const __m512 part = _mm512_div_ps(_mm512_set1_ps(2), _mm512_add_ps(power, one));
      score = _mm512_mul_ps(_mm512_sub_ps(one, part), _mm512_set1_ps(cap));
    }
}

// 16 rows: what each may see and how far its softmax has come.
class RowsInLanes {
 public:
  // Without a sink nothing was seen yet. A hidden score is lower by far than what it starts with.
  static constexpr float kHidden = -std::numeric_limits<float>::max(), kNothing = kHidden / 2;

  // Row r stands at `positions[r]` and sees `window` positions (0: all).
  void start(
      const int (&positions)[kTileSide], int window, const float (&largest)[kTileSide],
      const float (&total)[kTileSide]) {
    last_ = _mm512_loadu_si512(positions);
    const int least = _mm512_reduce_min_epi32(last_), most = _mm512_reduce_max_epi32(last_);
    first_ = window > 0 ? _mm512_sub_epi32(last_, _mm512_set1_epi32(window - 1))
                        : _mm512_setzero_si512();
    end_ = most + 1;
    begin_ = window > 0 ? std::max(0, least - window + 1) : 0;
    all_see_begin_ = window > 0 ? most - window + 1 : 0;
    all_see_end_ = least + 1;
    largest_ = _mm512_loadu_ps(largest);
    total_ = _mm512_loadu_ps(total);
  }

  void stop(float (&largest)[kTileSide], float (&total)[kTileSide]) const {
    _mm512_storeu_ps(largest, largest_);
    _mm512_storeu_ps(total, total_);
  }

  int begin() const { return begin_; }  // what any row sees
  int end() const { return end_; }

  // Scores of the keys from position `begin` on, in tiles of 16 that are `stride` apart -> their weights
  // relative to the largest score so far, rounded, row by row. What was added up before is to be
  // multiplied by the result. Compiled once, as sums are to come out alike.
  [[gnu::noinline]] __m512 weigh(
      TileSums* scores, int stride, int begin, int num_steps, float softcap, c10::BFloat16* weights,
      int row_length) {
    const int end = begin + num_steps * kTileInputs;
    if (softcap > 0) cap_softly(scores, 2 * num_steps, stride, softcap);
    if (begin < all_see_begin_ || end > all_see_end_)
      for_keys(scores, stride, num_steps, [&](int key, __m512& score) { hide(begin + key, score); });
    __m512 largest[2] = {largest_, largest_};
    for_keys(scores, stride, num_steps, [&](int key, __m512& score) {
      largest[key % 2] = _mm512_max_ps(largest[key % 2], score);
    });
    largest[0] = _mm512_max_ps(largest[0], largest[1]);
    const __m512 before = power_of_two(_mm512_sub_ps(largest_, largest[0]));
    largest_ = largest[0];
    const __m512 sum = weigh_tiles(scores, stride, num_steps, weights, row_length);
    total_ = _mm512_fmadd_ps(total_, before, sum);
    return before;
  }

 private:
  // function(key, its scores)
  template <typename function_t>
  static void for_keys(TileSums* scores, int stride, int num_steps, function_t&& function) {
    for (int tile = 0; tile < num_steps * 2; ++tile)
#pragma GCC unroll 16
      for (int key = 0; key < kTileSide; ++key)
        function(tile * kTileSide + key, scores[tile * stride].rows[key]);
  }

  void hide(int position, __m512& score) const {
    const __m512i here = _mm512_set1_epi32(position);
    const __mmask16 seen =
        _mm512_cmple_epi32_mask(here, last_) & _mm512_cmpge_epi32_mask(here, first_);
    score = _mm512_mask_blend_ps(seen, _mm512_set1_ps(kHidden), score);
  }

  // The sum of the weights, not rounded.
  __m512 weigh_tiles(
      const TileSums* scores, int stride, int num_steps, c10::BFloat16* weights,
      int row_length) const {
    __m512 even = _mm512_setzero_ps(), odd = even;
    for (int step = 0; step < num_steps; ++step) {
      __m512i columns[kTileSide];
      for (int half = 0; half < 2; ++half) {
        const TileSums& from = scores[(2 * step + half) * stride];
        __m512 powers[kTileSide];
#pragma GCC unroll 8
        for (int key = 0; key < kTileSide; key += 2) {
          powers[key] = power_of_two(_mm512_sub_ps(from.rows[key], largest_));
          powers[key + 1] = power_of_two(_mm512_sub_ps(from.rows[key + 1], largest_));
          even = _mm512_add_ps(even, powers[key]);
          odd = _mm512_add_ps(odd, powers[key + 1]);
        }
#pragma GCC unroll 8
        for (int key = 0; key < 8; ++key)
          columns[half * 8 + key] = (__m512i)_mm512_cvtne2ps_pbh(powers[key + 8], powers[key]);
      }
      transpose_columns(columns);
      for (int row = 0; row < kTileSide; ++row)
        _mm512_store_si512(weights + row * row_length + step * kTileInputs, columns[row]);
    }
    return _mm512_add_ps(even, odd);
  }

  __m512 largest_, total_;
  __m512i first_, last_;
  int begin_, end_, all_see_begin_, all_see_end_;
};

}  // namespace relevo
#endif
