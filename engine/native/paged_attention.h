// Attention of one layer over the paged KV cache, see `paged_attention.cpp`.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace relevo {

// Writes this step's keys and values into the cache, then attends; [tokens, heads, value_dim].
at::Tensor paged_attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, at::Tensor cache,
    int64_t layer, const at::Tensor& block_table, const at::Tensor& row_starts,
    const at::Tensor& context_lens, double scale, int64_t window, double softcap,
    const std::optional<at::Tensor>& sinks);

}  // namespace relevo
