// float32 rows times bfloat16 weights, which are read where they lie and widened in registers.
//
// A result is the sum of its products from the first input to the last, of kInputsAtOnce inputs at a
// time, whatever rows stand beside its own and however many: a token is computed alike alone, in a
// batch and in a prompt.
#pragma once

#include <algorithm>
#include <vector>

#include "lanes.h"
#include "rounded_rows.h"
#include "tile_product.h"
#include "turned_weights.h"

namespace relevo {

constexpr int64_t kFewTokens = 6;       // above, it pays to lay widened weights down
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
  const RoundedRows* rounded = nullptr;  // the input in bfloat16, where its products are to be of that

  int64_t num_panels() const { return (num_outputs + kPanelOutputs - 1) / kPanelOutputs; }
};

// partial[token] += inputs from `k` on times kTurnedOutputs rows of weights.
template <int tokens>
inline void add_turned(
    const float* input, const c10::BFloat16* weight, int64_t num_inputs, int64_t k,
    Turned* partial) {
  TurnedPairs pairs[kTurnedInputs / 2];
  turn(weight + k, num_inputs, pairs);
#pragma GCC unroll 8
  for (int j = 0; j < kTurnedInputs / 2; ++j) {
    const Turned one = first_of(pairs[j]), two = second_of(pairs[j]);
    const float* from = input + k + 2 * j;
#pragma GCC unroll 8
    for (int t = 0; t < tokens; ++t)
      partial[t] = add_in_order(partial[t], from[t * num_inputs] * one);
#pragma GCC unroll 8
    for (int t = 0; t < tokens; ++t)
      partial[t] = add_in_order(partial[t], from[t * num_inputs + 1] * two);
  }
}

// A few tokens with kTurnedOutputs outputs from `first` on; `ahead` are the weights that follow.
// One token alone would wait for each of its sums: then two stretches of inputs go side by side.
template <int tokens>
inline void turned_products(
    const NarrowProduct& call, int64_t first, const c10::BFloat16* ahead) {
  constexpr int stretches = tokens > 2 ? 1 : 2;
  const int64_t num_inputs = call.num_inputs;
  const c10::BFloat16* weight = call.weight + first * num_inputs;
  Turned total[tokens] = {};
  if (call.bias)
    for (int t = 0; t < tokens; ++t) std::memcpy(&total[t], call.bias + first, sizeof(Turned));
  for (int64_t begin = 0; begin < num_inputs; begin += stretches * kInputsAtOnce) {
    Turned partial[stretches][tokens] = {};
    for (int64_t k = begin; k < std::min(begin + kInputsAtOnce, num_inputs); k += kTurnedInputs)
#pragma GCC unroll 2
      for (int s = 0; s < stretches; ++s) {
        const int64_t own = k + s * kInputsAtOnce;
        if (own + kTurnedInputs > num_inputs) continue;
        // A row is too short for the core to see the next ones coming: it is told line by line.
        for (int i = 0; i < kTurnedOutputs * kTurnedInputs; i += 32) __builtin_prefetch(ahead + i);
        ahead += kTurnedOutputs * kTurnedInputs;
        add_turned<tokens>(call.input, weight, num_inputs, own, partial[s]);
      }
    for (int s = 0; s < stretches; ++s) {
      const int64_t end = std::min(begin + (s + 1) * kInputsAtOnce, num_inputs);
      for (int64_t k = std::max(begin + s * kInputsAtOnce, end / kTurnedInputs * kTurnedInputs);
           k < end; ++k) {
        const Turned one = turn_one(weight + k, num_inputs);
        for (int t = 0; t < tokens; ++t)
          partial[s][t] = add_in_order(partial[s][t], call.input[t * num_inputs + k] * one);
      }
      if (begin + s * kInputsAtOnce < num_inputs)
        for (int t = 0; t < tokens; ++t) total[t] = add_in_order(total[t], partial[s][t]);
    }
  }
  for (int t = 0; t < tokens; ++t)
    std::memcpy(call.output + t * call.num_outputs + first, &total[t], sizeof(Turned));
}

template <int tokens = kFewTokens>
inline void few_tokens(const NarrowProduct& call, int64_t begin, int64_t end) {
  if (call.num_tokens == tokens) {
    for (int64_t first = begin; first < end; first += kTurnedOutputs)
      turned_products<tokens>(
          call, first, call.weight + std::min(first + kTurnedOutputs, end) * call.num_inputs);
  } else if constexpr (tokens > 1) {
    few_tokens<tokens - 1>(call, begin, end);
  }
}

// [inputs, kPanelOutputs]: the weights of a panel's outputs, turned on their side and widened.
inline void turn_panel(const c10::BFloat16* weight, int64_t stride, int64_t num_inputs, float* panel) {
  for (int n = 0; n < kPanelOutputs; n += kTurnedOutputs) {
    const c10::BFloat16* rows = weight + n * stride;
    float* to = panel + n;
    int64_t k = 0;
    for (; k + kTurnedInputs <= num_inputs; k += kTurnedInputs) {
      TurnedPairs pairs[kTurnedInputs / 2];
      turn(rows + k, stride, pairs);
#pragma GCC unroll 8
      for (int j = 0; j < kTurnedInputs / 2; ++j) {
        const Turned both[] = {first_of(pairs[j]), second_of(pairs[j])};
        std::memcpy(to + (k + 2 * j) * kPanelOutputs, &both[0], sizeof(Turned));
        std::memcpy(to + (k + 2 * j + 1) * kPanelOutputs, &both[1], sizeof(Turned));
      }
    }
    for (; k < num_inputs; ++k) {
      const Turned one = turn_one(rows + k, stride);
      std::memcpy(to + k * kPanelOutputs, &one, sizeof(Turned));
    }
  }
}

inline void many_tokens(const NarrowProduct& call, int64_t begin, int64_t end) {
  thread_local Numbers<float> panel(kInputsAtOnce * kPanelOutputs);
  for (int64_t first = begin; first < end; first += kPanelOutputs) {
    float* output = call.output + first;
    if (call.bias)
      for (int64_t token = 0; token < call.num_tokens; ++token)
        std::copy_n(call.bias + first, kPanelOutputs, output + token * call.num_outputs);
    // The panel that follows is fetched from memory while this one is multiplied.
    const int64_t following = std::min(first + kPanelOutputs, end);
    Fetching ahead(
        call.weight + following * call.num_inputs,
        call.weight + std::min(following + kPanelOutputs, end) * call.num_inputs);
    for (int64_t input = 0; input < call.num_inputs; input += kInputsAtOnce) {
      const int64_t num_inputs = std::min(kInputsAtOnce, call.num_inputs - input);
      const c10::BFloat16* weight = call.weight + first * call.num_inputs + input;
      turn_panel(weight, call.num_inputs, num_inputs, panel.data());
      tile_product<float>(
          call.input + input, call.num_inputs, panel.data(), kPanelOutputs, output,
          call.num_outputs, call.num_tokens, num_inputs, kPanelOutputs, call.bias || input > 0,
          ahead);
    }
  }
}

void narrow_product(const NarrowProduct& call, int64_t begin, int64_t end);

// Fewer outputs than go together, from `first` to the last: with zeros beside them.
inline void padded_product(const NarrowProduct& call, int64_t first) {
  const int64_t count = call.num_outputs - first;
  std::vector<c10::BFloat16> weight(kPanelOutputs * call.num_inputs);
  std::vector<float> bias(kPanelOutputs), output(call.num_tokens * kPanelOutputs);
  std::copy_n(call.weight + first * call.num_inputs, count * call.num_inputs, weight.data());
  if (call.bias) std::copy_n(call.bias + first, count, bias.data());
  const NarrowProduct padded{
      call.input, weight.data(), call.bias ? bias.data() : nullptr, output.data(),
      call.num_tokens, call.num_inputs, kPanelOutputs};
  narrow_product(padded, 0, kPanelOutputs);
  for (int64_t token = 0; token < call.num_tokens; ++token)
    std::copy_n(
        &output[token * kPanelOutputs], count, call.output + token * call.num_outputs + first);
}

// Outputs of all tokens, of some panels: `begin` is a multiple of kPanelOutputs.
inline void narrow_product(const NarrowProduct& call, int64_t begin, int64_t end) {
  const int64_t whole = end / kPanelOutputs * kPanelOutputs;
  if (call.num_tokens > kFewTokens)
    many_tokens(call, begin, whole);
  else
    few_tokens(call, begin, whole);
  if (whole < end) padded_product(call, whole);
}

// Panels that are worth waking another thread for.
inline int64_t panels_per_thread(int64_t num_tokens, int64_t num_inputs) {
  constexpr int64_t kProducts = 1 << 16;
  return 1 + kProducts / std::max<int64_t>(1, num_tokens * num_inputs * kPanelOutputs);
}

}  // namespace relevo
