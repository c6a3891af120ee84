// float32 rows, rounded to bfloat16, times bfloat16 weights where they lie; sums in float32.
#pragma once

#include <algorithm>
#include <vector>

#include "activation.h"
#include "dot_products.h"
#include "narrow_product.h"
#include "rounded_rows.h"

namespace relevo {

#ifdef __AVX512BF16__

// Weights of kTileSide outputs where they lie; zeros stand for what the matrix does not have.
class TileWeights {
 public:
  TileWeights(const NarrowProduct& call, int64_t first)
      : rows_(call.weight + first * call.num_inputs) {
    const int64_t count = std::max<int64_t>(0, call.num_outputs - first);
    if (count >= kTileSide) return;
    copy_.resize(kTileSide * call.num_inputs);
    std::copy_n(rows_, count * call.num_inputs, copy_.begin());
    rows_ = copy_.data();
  }
  const c10::BFloat16* rows() const { return rows_; }

 private:
  const c10::BFloat16* rows_;
  std::vector<c10::BFloat16> copy_;
};

// Inputs that stay in the core's cache while weights go by.
inline int64_t groups_at_once(const RoundedRows& inputs) {
  constexpr int64_t kCachedBytes = 3 << 18;
  const int64_t group_bytes = inputs.tiles_per_group() * sizeof(RightTile);
  return std::max<int64_t>(2, kCachedBytes / group_bytes / 2 * 2);
}

// multiply(number, first group, last group) for each of some panels and all groups of tokens.
template <typename multiply_t>
inline void for_groups(
    const RoundedRows& inputs, int64_t begin, int64_t end, multiply_t&& multiply) {
  const TileUse tiles;
  const int64_t step = groups_at_once(inputs), num_groups = inputs.num_groups();
  for (int64_t first = 0; first < num_groups; first += step)
    for (int64_t panel = begin; panel < end; ++panel)
      multiply(panel, first, std::min(first + step, num_groups));
}

// sums[first weights, second][groups] of [tokens, outputs]; the next weights lie `ahead` numbers
// behind these.
template <int groups>
inline void multiply(
    const c10::BFloat16* const (&weights)[2], const RoundedRows& inputs, int64_t group,
    int64_t ahead, TileSums* sums) {
  const int num_tiles = inputs.tiles_per_group();
  const int64_t stride = num_tiles * kTileInputs;
  const RightTile* tiles = inputs.group(group);
#ifdef __AMX_BF16__
  if (may_use_tiles()) {
    // A row is too short for the core to see the next ones coming: it is told line by line.
    const auto fetch = [&](int i) {
      if (ahead)
        for (const c10::BFloat16* rows : weights)
          for (int line = 0; line < kTileSide; ++line)
            __builtin_prefetch(rows + ahead + (i * kTileSide + line) * kTileInputs);
    };
    multiply_tiles<2, groups>(weights, stride, tiles, num_tiles, num_tiles, sums, fetch);
    for (int i = 0; i < 2 * groups; ++i) transpose(sums[i].rows);
    return;
  }
#endif
  for (int i = 0; i < 2; ++i)
    for (int g = 0; g < groups; ++g)
      multiply_group(
          weights[i], stride, tiles + g * num_tiles, num_tiles, inputs.tokens_in(group + g),
          g == 0 ? ahead : 0, sums[i * groups + g]);
}

// Twice kTileSide outputs of some groups of tokens: finish(group, sums of the first outputs, of the
// second), both [tokens, outputs].
template <typename finish_t>
inline void multiply_groups(
    const RoundedRows& inputs, const TileWeights& first, const TileWeights& second, int64_t begin,
    int64_t end, int64_t ahead, finish_t&& finish) {
  const c10::BFloat16* const weights[] = {first.rows(), second.rows()};
  TileSums sums[4];
  for (int64_t group = begin; group < end; group += 2, ahead = 0) {
    const int num_groups = std::min<int64_t>(2, end - group);
    if (num_groups == 2)
      multiply<2>(weights, inputs, group, ahead, sums);
    else
      multiply<1>(weights, inputs, group, ahead, sums);
    for (int i = 0; i < num_groups; ++i) finish(group + i, sums[i], sums[num_groups + i]);
  }
}

// Outputs of a group's tokens from `first` on, as many as the product has of kTileSide.
class OutputTile {
 public:
  OutputTile(const NarrowProduct& call, int64_t group, int64_t first)
      : call_(call),
        to_(call.output + group * kTileSide * call.num_outputs + first),
        num_tokens_(call.rounded->tokens_in(group)),
        mask_(first_of_16(call.num_outputs - first)),
        bias_(call.bias ? _mm512_maskz_loadu_ps(mask_, call.bias + first) : __m512{}) {}

  int64_t num_tokens() const { return num_tokens_; }
  __m512 with_bias(__m512 sums) const { return sums + bias_; }
  void store(int64_t token, __m512 outputs) const {
    _mm512_mask_storeu_ps(to_ + token * call_.num_outputs, mask_, outputs);
  }

 private:
  const NarrowProduct& call_;
  float* to_;
  int64_t num_tokens_;
  __mmask16 mask_;
  __m512 bias_;
};

inline void store_outputs(
    const NarrowProduct& call, int64_t group, int64_t first, const TileSums& sums) {
  const OutputTile tile(call, group, first);
  for (int64_t token = 0; token < tile.num_tokens(); ++token)
    tile.store(token, tile.with_bias(sums.rows[token]));
}

// Outputs of all tokens, of some panels of kPanelOutputs.
inline void rounded_product(const NarrowProduct& call, int64_t begin, int64_t end) {
  static_assert(kPanelOutputs == 2 * kTileSide);
  for_groups(*call.rounded, begin, end, [&](int64_t panel, int64_t first_group, int64_t end_group) {
    const int64_t first = panel * kPanelOutputs, second = first + kTileSide;
    multiply_groups(
        *call.rounded, TileWeights(call, first), TileWeights(call, second), first_group, end_group,
        first_group == 0 ? kPanelOutputs * call.num_inputs : 0,
        [&](int64_t group, const TileSums& one, const TileSums& two) {
          store_outputs(call, group, first, one);
          store_outputs(call, group, second, two);
        });
  });
}

// activation(gates) * ups of all tokens, of some panels; both products have the same inputs.
inline void rounded_gates(
    const NarrowProduct& gates, const NarrowProduct& ups, Activation activation, int64_t begin,
    int64_t end) {
  constexpr int64_t kTilesPerPanel = kPanelOutputs / kTileSide;
  const RoundedRows& inputs = *gates.rounded;
  for_groups(
      inputs, begin * kTilesPerPanel, end * kTilesPerPanel,
      [&](int64_t number, int64_t first_group, int64_t end_group) {
        const int64_t first = number * kTileSide;
        multiply_groups(
            inputs, TileWeights(gates, first), TileWeights(ups, first), first_group, end_group,
            first_group == 0 ? kTileSide * gates.num_inputs : 0,
            [&](int64_t group, const TileSums& one, const TileSums& two) {
              const OutputTile gate(gates, group, first), up(ups, group, first);
              for (int64_t token = 0; token < gate.num_tokens(); ++token)
                gate.store(
                    token,
                    gated(activation, gate.with_bias(one.rows[token]), up.with_bias(two.rows[token])));
            });
      });
}

#else

// Not reached: no input is rounded here.
inline void rounded_product(const NarrowProduct&, int64_t, int64_t) {}
inline void rounded_gates(const NarrowProduct&, const NarrowProduct&, Activation, int64_t, int64_t) {}

#endif
}  // namespace relevo
