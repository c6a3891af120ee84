// Attention of one layer over the paged KV cache, read where it lies.

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <vector>

#include "attention_piece.h"
#include "attention_tiles.h"
#include "paged_attention.h"

namespace relevo {
namespace {

// To the nearest number, the even one of two, that the cache can hold.
template <typename scalar_t, typename cache_t>
void narrow(const scalar_t* from, int64_t count, cache_t* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<cache_t>(from[i]);
}

template <typename scalar_t, typename cache_t>
void write_rows(
    const Call<scalar_t, cache_t>& call, const at::Tensor& key, const at::Tensor& value, int num_rows,
    int num_kv_heads, int cache_dim) {
  const int num_tokens = key.size(0);
  std::vector<int> row_of(num_tokens);
  for (int row = 0; row < num_rows; ++row)
    std::fill(
        row_of.begin() + call.row_starts[row], row_of.begin() + call.row_starts[row + 1], row);
  const at::Tensor* both[] = {&key, &value};
  at::parallel_for(0, num_tokens, 64, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const int row = row_of[token];
      const int position =
          call.context_lens[row] - (call.row_starts[row + 1] - static_cast<int>(token));
      for (int plane = 0; plane < 2; ++plane) {
        const at::Tensor& from = *both[plane];
        const scalar_t* source = from.const_data_ptr<scalar_t>() + token * from.stride(0);
        for (int head = 0; head < num_kv_heads; ++head) {
          cache_t* to = call.slot(row, position, plane, head);
          narrow(source + head * from.stride(1), from.size(2), to);
          std::fill(to + from.size(2), to + cache_dim, cache_t(0));
        }
      }
    }
  });
}

std::vector<Piece> pieces_of(
    const int32_t* row_starts, int num_rows, int num_kv_heads, int group, int rows_per_piece,
    int few_rows) {
  std::vector<Piece> pieces;
  const int queries_at_once = std::max(1, rows_per_piece / group);
  // Heads of a single token stay together, unless that leaves threads without work.
  const int pieces_per_row = std::max(1, 2 * at::get_num_threads() / num_rows);
  const int heads_at_once = std::max(1, num_kv_heads / pieces_per_row);
  // Long rows lie last in the batch and their last pieces have most keys: those first.
  for (int row = num_rows - 1; row >= 0; --row) {
    const int num_queries = row_starts[row + 1] - row_starts[row];
    const int num_heads = num_queries * group <= few_rows ? heads_at_once : 1;
    const int last = (num_queries - 1) / queries_at_once * queries_at_once;
    for (int first = last; first >= 0; first -= queries_at_once)
      for (int head = 0; head < num_kv_heads; head += num_heads)
        pieces.push_back(
            {row, head, std::min(num_heads, num_kv_heads - head), first,
             std::min(queries_at_once, num_queries - first)});
  }
  return pieces;
}

// run(piece, memory of the thread) for each.
template <typename space_t, typename piece_t, typename run_t>
void run_pieces(const std::vector<piece_t>& pieces, run_t&& run) {
  if (pieces.empty()) return;
  std::atomic<size_t> next{0};
  // Each thread takes the next piece when it is done with one: pieces differ in length.
  at::parallel_for(0, at::get_num_threads(), 1, [&](int64_t begin, int64_t end) {
    space_t space;
    for (int64_t i = begin; i < end; ++i)
      for (size_t n = next++; n < pieces.size(); n = next++) run(pieces[n], space);
  });
}

#ifdef __AMX_BF16__
void attend_by_tiles(const TileRun::TileCall& call, int num_rows, int num_kv_heads) {
  const auto prefixes =
      SharedPrefixes<TileRun::TileCall>::of(call, num_rows, TileRun::kStretch);
  RowStates states(num_rows, call.num_heads, LaneGroups::state_width(call));
  for (const SharedPrefix& prefix : prefixes) states.share(prefix);
  const TilePieces pieces(call, num_kv_heads, at::get_num_threads());
  const auto run = [&](const TilePiece& piece, TileRun::Space& space) {
    TileRun(call, states, space, piece).run();
  };
  run_pieces<TileRun::Space>(pieces.of_prefixes(prefixes), run);
  run_pieces<TileRun::Space>(pieces.of_requests(num_rows, states), run);
}
#endif

template <typename scalar_t, typename cache_t>
void attend(const Call<scalar_t, cache_t>& call, int num_rows, int num_kv_heads) {
#ifdef __AMX_BF16__
  if constexpr (std::is_same_v<Call<scalar_t, cache_t>, TileRun::TileCall>)
    if (TileRun::suits(call)) return attend_by_tiles(call, num_rows, num_kv_heads);
#endif
  using run_t = PieceRun<scalar_t, cache_t>;
  const auto pieces = pieces_of(
      call.row_starts, num_rows, num_kv_heads, call.group, run_t::kRowsPerPiece, run_t::kFewRows);
  run_pieces<typename run_t::Space>(
      pieces, [&](const Piece& piece, auto& space) { run_t(call, space, piece).run(); });
}

}  // namespace

at::Tensor paged_attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, at::Tensor cache,
    int64_t layer, const at::Tensor& block_table, const at::Tensor& row_starts,
    const at::Tensor& context_lens, double scale, int64_t window, double softcap,
    const std::optional<at::Tensor>& sinks) {
  TORCH_CHECK(query.stride(2) == 1 && key.stride(2) == 1 && value.stride(2) == 1,
      "expected heads whose numbers lie side by side");
  TORCH_CHECK(key.scalar_type() == query.scalar_type() && value.scalar_type() == query.scalar_type(),
      "expected queries, keys and values of one dtype");
  const bool is_narrowed = cache.scalar_type() != query.scalar_type();
  TORCH_CHECK(
      !is_narrowed || (query.scalar_type() == at::kFloat && cache.element_size() == 2),
      "expected a cache of the queries' dtype, or of 16 bits for float32");
  TORCH_CHECK(block_table.is_contiguous() && cache.is_contiguous(), "expected contiguous memory");
  const int num_kv_heads = key.size(1);
  TORCH_CHECK(query.size(1) % num_kv_heads == 0, "expected KV heads that divide the heads");
  const int num_rows = context_lens.size(0);
  at::Tensor output = at::empty({query.size(0), query.size(1), value.size(2)}, query.options());
  const at::Tensor own_sinks =
      !sinks ? at::Tensor()
             : sinks->to(query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat).contiguous();
  const auto run = [&](auto scalar, auto cached) {
    using scalar_t = decltype(scalar);
    using cache_t = decltype(cached);
    Call<scalar_t, cache_t> call;
    call.query = query.const_data_ptr<scalar_t>();
    call.query_token = query.stride(0);
    call.query_head = query.stride(1);
    call.output = output.mutable_data_ptr<scalar_t>();
    call.cache = cache.mutable_data_ptr<cache_t>() + layer * cache.stride(1);
    call.block_stride = cache.stride(0);
    call.plane_stride = cache.stride(2);
    call.token_stride = cache.stride(3);
    call.head_stride = cache.stride(4);
    call.block_table = block_table.const_data_ptr<int32_t>();
    call.row_starts = row_starts.const_data_ptr<int32_t>();
    call.context_lens = context_lens.const_data_ptr<int32_t>();
    call.sinks = sinks ? own_sinks.const_data_ptr<acc_type<scalar_t>>() : nullptr;
    call.max_blocks = block_table.size(1);
    call.block_size = cache.size(3);
    call.num_heads = query.size(1);
    call.group = query.size(1) / num_kv_heads;
    call.head_dim = query.size(2);
    call.value_dim = value.size(2);
    call.window = window;
    call.scale = scale;
    call.softcap = softcap;
    write_rows(call, key, value, num_rows, num_kv_heads, cache.size(5));
    attend(call, num_rows, num_kv_heads);
  };
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kBFloat16, at::kHalf, query.scalar_type(), "paged_attention", [&] {
        if (!is_narrowed)
          run(scalar_t{}, scalar_t{});
        else if (cache.scalar_type() == at::kBFloat16)
          run(float{}, at::BFloat16{});
        else
          run(float{}, at::Half{});
      });
  return output;
}

TORCH_LIBRARY_FRAGMENT(relevo, library) {
  library.def(
      "paged_attention(Tensor query, Tensor key, Tensor value, Tensor(a!) cache, int layer, "
      "Tensor block_table, Tensor row_starts, Tensor context_lens, float scale, int window, "
      "float softcap, Tensor? sinks) -> Tensor");
}

TORCH_LIBRARY_IMPL(relevo, CPU, library) { library.impl("paged_attention", paged_attention); }

}  // namespace relevo
