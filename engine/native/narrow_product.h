// float32 rows times bfloat16 weights, which are read where they lie and widened in registers.
//
// A result depends on its own row alone: the same lanes add up the same products in the same order,
// whatever rows stand beside it, as long as there are few of them or as long as there are many.
#pragma once

#include <algorithm>
#include <vector>

#include "lanes.h"
#include "tile_product.h"

namespace relevo {

constexpr int64_t kFewTokens = 48;      // above, it pays to turn widened weights on their side
constexpr int64_t kInputsAtOnce = 288;  // of a widened panel, so that it stays in the core's cache
constexpr int kPanelOutputs = kTileLanes * Lanes<float>::count;

// One call: input [tokens, num_inputs], weight [num_outputs, num_inputs], bias [num_outputs] or
// null, output [tokens, num_outputs]; all contiguous.
struct NarrowProduct {
  const float* input;
  const c10::BFloat16* weight;
  const float* bias;
  float* output;
  int64_t num_tokens, num_inputs, num_outputs;

  int64_t num_panels() const { return (num_outputs + kPanelOutputs - 1) / kPanelOutputs; }
};

// Dot products of a few tokens from `token` on with a few outputs from `first` on.
template <int tokens, int outputs>
inline void dot_products(const NarrowProduct& call, int64_t token, int64_t first) {
  using V = Lanes<float>::type;
  constexpr int width = Lanes<float>::count;
  const int64_t num_inputs = call.num_inputs;
  const float* input = call.input + token * num_inputs;
  const c10::BFloat16* weight = call.weight + first * num_inputs;
  V total[tokens][outputs] = {};
  int64_t k = 0;
  for (; k + width <= num_inputs; k += width) {
    V wide[outputs];
#pragma GCC unroll 8
    for (int n = 0; n < outputs; ++n) {
      wide[n] = load(weight + n * num_inputs + k);
      // A row is too short for the core to see the next ones coming.
      __builtin_prefetch(weight + (n + 2 * outputs) * num_inputs + k);
    }
#pragma GCC unroll 8
    for (int t = 0; t < tokens; ++t) {
      const V lanes = load(input + t * num_inputs + k);
#pragma GCC unroll 8
      for (int n = 0; n < outputs; ++n) total[t][n] += lanes * wide[n];
    }
  }
  for (int t = 0; t < tokens; ++t)
    for (int n = 0; n < outputs; ++n) {
      float one = sum(total[t][n]) + (call.bias ? call.bias[first + n] : 0.0f);
      for (int64_t rest = k; rest < num_inputs; ++rest)
        one += input[t * num_inputs + rest] * static_cast<float>(weight[n * num_inputs + rest]);
      call.output[(token + t) * call.num_outputs + first + n] = one;
    }
}

template <int outputs, int tokens = 4>
inline void all_tokens(const NarrowProduct& call, int64_t first, int64_t token = 0) {
  for (; token + tokens <= call.num_tokens; token += tokens)
    dot_products<tokens, outputs>(call, token, first);
  if constexpr (tokens > 1)
    if (token < call.num_tokens) all_tokens<outputs, tokens - 1>(call, first, token);
}

template <int outputs>
inline void few_tokens(const NarrowProduct& call, int64_t begin, int64_t end) {
  int64_t first = begin;
  for (; first + outputs <= end; first += outputs) all_tokens<outputs>(call, first);
  for (; first < end; ++first) all_tokens<1>(call, first);
}

// [inputs, kPanelOutputs]: the weights of a panel's outputs, turned on their side and widened.
inline void turn_panel(
    const NarrowProduct& call, int64_t first, int64_t input, int64_t num_inputs, float* panel) {
  constexpr int width = Lanes<float>::count;
  for (int n = 0; n < kPanelOutputs; ++n) {
    const c10::BFloat16* row = call.weight + (first + n) * call.num_inputs + input;
    int64_t k = 0;
    for (; k + width <= num_inputs; k += width) {
      const Lanes<float>::type wide = load(row + k);
      for (int i = 0; i < width; ++i) panel[(k + i) * kPanelOutputs + n] = wide[i];
    }
    for (; k < num_inputs; ++k) panel[k * kPanelOutputs + n] = static_cast<float>(row[k]);
  }
}

inline void many_tokens(const NarrowProduct& call, int64_t begin, int64_t end) {
  thread_local std::vector<float> panel(kInputsAtOnce * kPanelOutputs);
  int64_t first = begin;
  for (; first + kPanelOutputs <= end; first += kPanelOutputs) {
    float* output = call.output + first;
    if (call.bias)
      for (int64_t token = 0; token < call.num_tokens; ++token)
        std::copy_n(call.bias + first, kPanelOutputs, output + token * call.num_outputs);
    for (int64_t input = 0; input < call.num_inputs; input += kInputsAtOnce) {
      const int64_t num_inputs = std::min(kInputsAtOnce, call.num_inputs - input);
      turn_panel(call, first, input, num_inputs, panel.data());
      tile_product<float>(
          call.input + input, call.num_inputs, panel.data(), kPanelOutputs, output,
          call.num_outputs, call.num_tokens, num_inputs, kPanelOutputs, call.bias || input > 0);
    }
  }
  few_tokens<3>(call, first, end);  // less than a panel is left
}

// Outputs of all tokens, of some panels: `begin` is a multiple of kPanelOutputs.
inline void narrow_product(const NarrowProduct& call, int64_t begin, int64_t end) {
  if (call.num_tokens > kFewTokens)
    many_tokens(call, begin, end);
  else
    few_tokens<3>(call, begin, end);
}

// Panels that are worth waking another thread for.
inline int64_t panels_per_thread(int64_t num_tokens, int64_t num_inputs) {
  constexpr int64_t kProducts = 1 << 16;
  return 1 + kProducts / std::max<int64_t>(1, num_tokens * num_inputs * kPanelOutputs);
}

}  // namespace relevo
