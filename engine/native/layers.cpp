// What a layer does beside attention, and all of it, as torch operations. One file, for torch's own headers take
// most of the time that compiling takes.

#include <torch/library.h>

#include "decoder_layer.h"
#include "decoder_stack.h"
#include "gated_linear.h"
#include "linear.h"
#include "pinned_threads.h"
#include "rms_norm.h"
#include "rotary.h"

namespace relevo {

TORCH_LIBRARY_FRAGMENT(relevo, library) {
  library.def("linears(Tensor input, Tensor[] weights, Tensor?[] biases, bool rounds=False) -> Tensor[]");
  library.def("widening_linear(Tensor input, Tensor weight, Tensor? bias, bool rounds=False) -> Tensor");
  library.def(
      "gated_linear(Tensor input, Tensor gate, Tensor up, Tensor? gate_bias, Tensor? up_bias, "
      "int activation, bool rounds=False) -> Tensor");
  library.class_<DecoderLayer>("DecoderLayer")
      .def(torch::init<
           const DecoderLayer::Optionals&, const DecoderLayer::Factors&,
           const DecoderLayer::Factors&, DecoderLayer::Weights, const DecoderLayer::Optionals&,
           int64_t, int64_t, double, int64_t, double, int64_t, double,
           std::optional<at::Tensor>>())
      .def("forward", &DecoderLayer::forward)
      .def("round_inputs", &DecoderLayer::round_inputs);
  library.class_<DecoderStack>("DecoderStack")
      .def(torch::init<DecoderStack::Layers>())
      .def("forward", &DecoderStack::forward);
  library.def("rms_norm(Tensor input, Tensor weight, float epsilon, float offset) -> Tensor");
  library.def("pin_threads(int[] cores) -> ()", pin_threads);
  library.def("rotary(Tensor(a!) query, Tensor(b!) key, Tensor cosine, Tensor sine) -> ()");
}

TORCH_LIBRARY_IMPL(relevo, CPU, library) {
  library.impl("linears", linears);
  library.impl("widening_linear", widening_linear);
  library.impl("gated_linear", gated_linear);
  library.impl("rms_norm", rms_norm);
  library.impl("rotary", rotary);
}

}  // namespace relevo
