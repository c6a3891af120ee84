// Layers that follow each other in one call: nothing of Python stands between them.
#pragma once

#include <utility>
#include <vector>

#include "decoder_layer.h"

namespace relevo {

class DecoderStack : public torch::CustomClassHolder {
 public:
  using Layers = std::vector<c10::intrusive_ptr<DecoderLayer>>;

  explicit DecoderStack(Layers layers) : layers_(std::move(layers)) {}

  // As of one layer.
  at::Tensor forward(
      const at::Tensor& hidden, const at::Tensor& cosine, const at::Tensor& sine,
      const at::Tensor& cache, const at::Tensor& block_table, const at::Tensor& row_starts,
      const at::Tensor& context_lens) const {
    at::Tensor passed = hidden;
    for (const auto& layer : layers_)
      passed = layer->forward(passed, cosine, sine, cache, block_table, row_starts, context_lens);
    return passed;
  }

 private:
  Layers layers_;
};

}  // namespace relevo
