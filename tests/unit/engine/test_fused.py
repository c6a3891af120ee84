"""Fused modules do what the modules they replace do, and take the place of no others."""

import shutil
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from engine.attention import ATTENTION_NAME, register_attention
from engine.batch import Batch
from engine.fused.attention import FusedAttention
from engine.fused.fuse import fuse_model, fuse_modules
from engine.fused.gated_mlp import ACTIVATIONS, FusedGatedMLP
from engine.fused.layer import FusedLayer
from engine.fused.norm import FusedNorm, norm_candidates
from engine.fused.probe import POSITIONS, small_step
from engine.fused.stack import FusedStack
from engine.kv_cache import KVCacheSpec
from engine.model_probe import probe_model
from engine.native.library import load_library
from tests.tiny_families import FAMILIES, Family

pytestmark = pytest.mark.skipif(
    shutil.which("c++") is None, reason="no C++ compiler on this machine"
)
NAMES = {
    FusedNorm: "norm",
    FusedAttention: "attention",
    FusedGatedMLP: "mlp",
    FusedLayer: "layer",
}
KINDS = {**FAMILIES, "exaone4": Family("Exaone4")}  # whose norms are all behind
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-12}
WHOLE = {"norm": 5, "attention": 2, "mlp": 2, "layer": 2}  # of two layers


@pytest.fixture(autouse=True)
def library() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    register_attention()
    assert load_library(), "make setup builds it"


def close(one: torch.Tensor, two: torch.Tensor) -> bool:
    tolerance = TOLERANCES[one.dtype]
    return torch.allclose(one, two, rtol=tolerance, atol=tolerance * float(two.abs().max()))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(1, 1, 576), (3, 5), (2, 40, 3, 64)], ids=str)
def test_norm(shape: tuple[int, ...], offset: float, dtype: torch.dtype):
    hidden, weight = torch.randn(shape, dtype=dtype), torch.randn(shape[-1], dtype=dtype)
    truth = functional.rms_norm(hidden, shape[-1:], eps=1e-3) * (weight + offset)
    assert close(torch.ops.relevo.rms_norm(hidden, weight, 1e-3, offset), truth)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("width", [64, 24, 2])
def test_rotary(width: int, dtype: torch.dtype):
    query, key = torch.randn(7, 4, 64, dtype=dtype), torch.randn(7, 2, 64, dtype=dtype)
    cosine, sine = torch.randn(2, 7, width, dtype=dtype)
    truths = []
    for heads in (query, key):
        turned, rest = heads[..., :width], heads[..., width:]
        left, right = turned.chunk(2, dim=-1)
        turned = turned * cosine[:, None] + torch.cat((-right, left), dim=-1) * sine[:, None]
        truths.append(torch.cat((turned, rest), dim=-1))
    torch.ops.relevo.rotary(query, key, cosine, sine)
    assert close(query, truths[0])
    assert close(key, truths[1])


@pytest.mark.parametrize("num_tokens", [1, 6, 48, 49, 130])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_products_that_share_their_input(dtype: torch.dtype, has_bias: bool, num_tokens: int):
    wide = torch.float32 if dtype is torch.bfloat16 else dtype
    hidden = torch.randn(1, num_tokens, 100, dtype=wide)
    weights = [torch.randn(count, 100).to(dtype) for count in (40, 16, 7)]
    biases = [torch.randn(len(each), dtype=wide) if has_bias else None for each in weights]
    products = torch.ops.relevo.linears(hidden, weights, biases)
    for weight, bias, product in zip(weights, biases, products, strict=True):
        assert close(product, functional.linear(hidden, weight.to(wide), bias))


@pytest.mark.parametrize("num_tokens", [1, 49])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_gate(dtype: torch.dtype, activation: str, num_tokens: int):
    wide = torch.float32 if dtype is torch.bfloat16 else dtype
    hidden = torch.randn(1, num_tokens, 33, dtype=wide)
    gate, up = torch.randn(2, 50, 33).to(dtype)
    bias = torch.randn(50, dtype=wide)
    number = ACTIVATIONS.index(activation)
    gated = torch.ops.relevo.gated_linear(hidden, gate, up, bias, None, number)
    opened = functional.linear(hidden, gate.to(wide), bias)
    activated = {
        "silu": functional.silu(opened),
        "gelu_tanh": functional.gelu(opened, approximate="tanh"),
        "gelu": functional.gelu(opened),
    }
    assert close(gated, activated[activation] * functional.linear(hidden, up.to(wide)))


def build(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    kind = KINDS[family]
    model = kind.build(kind.config(**changes)).to(dtype).eval().requires_grad_(False)
    model.set_attn_implementation(ATTENTION_NAME)
    return model


def spec_of(model: Any) -> KVCacheSpec:
    return probe_model(model, max_model_len=100, block_size=8, wanted_windows={}).spec


def kinds_of(model: nn.Module) -> dict[str, int]:
    return dict(Counter(NAMES[type(each)] for each in model.modules() if type(each) in NAMES))


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", WHOLE),
        ("qwen2", WHOLE),
        ("qwen3", {**WHOLE, "norm": 9}),
        ("gemma3", {**WHOLE, "norm": 13}),
        ("mixtral", {"norm": 5, "attention": 2}),
        ("phi3", {"norm": 5}),
        ("exaone4", {**WHOLE, "norm": 9}),
        ("granite", WHOLE),  # what a layer adds is scaled
        ("smollm3", {**WHOLE, "attention": 1, "layer": 1}),  # one of its layers has no positions
        ("cohere", {"mlp": 2}),  # its pairs are neighbours, its norm is another one
        ("gpt2", {}),
    ],
)
def test_what_is_known_is_fused(family: str, expected: dict[str, int]):
    model = build(family)
    assert fuse_modules(model, spec_of(model)) == sum(expected.values())
    assert kinds_of(model) == expected


def test_in_float64_a_norm_that_rounds_to_float32_stays():
    model = build("llama", torch.float64)
    fuse_modules(model, spec_of(model))
    assert kinds_of(model) == {"attention": 2, "mlp": 2}


@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "granite", "exaone4"]
)
def test_a_whole_layer_is_the_same_to_rounding(family: str):
    model = build(family, torch.float64)
    for name, module in list(model.named_modules()):
        if norms := list(norm_candidates(module)):  # which do not round to float32
            model.set_submodule(name, norms[family.startswith("gemma")])
    fuse_modules(model, spec_of(model))
    assert kinds_of(model)["layer"] == 2


@pytest.mark.parametrize(
    ("family", "num_stacks"),
    [
        ("llama", 1),
        ("qwen3", 1),
        ("granite", 1),
        ("gemma3", 0),  # layers with a window have angles of their own
        ("smollm3", 0),  # one layer is not whole
    ],
)
def test_layers_in_a_row_are_one_call(family: str, num_stacks: int):
    model = build(family)
    fuse_modules(model, spec_of(model))
    assert sum(isinstance(each, FusedStack) for each in model.modules()) == num_stacks


@pytest.mark.parametrize(
    ("family", "changes", "is_whole"),
    [
        ("llama", {}, True),
        ("qwen2", {}, True),
        ("qwen3", {}, True),
        ("mistral", {}, True),
        ("granite", {}, True),
        ("granite", {"embedding_multiplier": 12.0}, False),
        ("granite", {"logits_scaling": 8.0}, False),
        ("gemma2", {}, False),  # logits have a cap
        ("smollm3", {}, False),  # its layers are not one call
        ("gpt2", {}, False),
    ],
)
def test_a_model_is_whole_where_nothing_is_left_around_its_parts(
    family: str, changes: dict[str, float], is_whole: bool
):
    model = build(family, **changes)
    spec = spec_of(model)
    fuse_modules(model, spec)
    assert (fuse_model(model, spec) is not None) is is_whole


@torch.inference_mode()
@pytest.mark.parametrize("index", [[0, 1, 2, 3, 4], [1, 4], [4, 0], [1, 3, 4, 0, 2], []], ids=str)
def test_a_whole_model_has_the_logits_that_are_wanted(index: list[int]):
    model = build("llama")
    spec = spec_of(model)
    fuse_modules(model, spec)
    fused = fuse_model(model, spec)
    assert fused is not None
    batch = Batch(
        token_ids=torch.tensor([[5, 9, 7, 11, 3]]),
        position_ids=torch.tensor([POSITIONS]),
        sample_index=torch.tensor(index, dtype=torch.long),
        num_samples=min(2, len(index)),
        attention=small_step(spec),
    )
    expected = model(
        input_ids=batch.token_ids,
        position_ids=batch.position_ids,
        use_cache=False,
        attention_metadata=small_step(spec),
    )
    assert torch.equal(fused.logits(batch), expected.logits[0][index])


def test_a_model_that_does_a_little_more_is_not_whole():
    model = build("llama")
    spec = spec_of(model)
    fuse_modules(model, spec)
    body = model.model
    forward = body.forward

    def louder(*arguments: Any, **keywords: Any) -> Any:
        output = forward(*arguments, **keywords)
        output.last_hidden_state = output.last_hidden_state * 1.0001
        return output

    body.forward = louder
    assert fuse_model(model, spec) is None


class Louder(nn.Module):
    """Does a little more than the module whose children it has."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.__dict__.update(module.__dict__)
        self.inner = type(module).forward

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        answer = self.inner(self, *arguments, **keywords)
        return answer * 1.001 if isinstance(answer, torch.Tensor) else (answer[0] * 1.001, None)


class TornWhenSmall(Louder):
    """Has no answer to small numbers."""

    def forward(self, hidden: torch.Tensor) -> Any:
        answer = self.inner(self, hidden)
        return answer if hidden.abs().max() > 0.02 else answer * float("nan")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("input_layernorm", Louder),
        ("self_attn", Louder),
        ("mlp", Louder),
        ("input_layernorm", TornWhenSmall),
        ("mlp", TornWhenSmall),
    ],
)
def test_what_only_looks_alike_stays(name: str, kind: type[Louder]):
    model = build("llama")
    path = f"model.layers.1.{name}"
    other = kind(model.get_submodule(path))
    model.set_submodule(path, other)
    assert fuse_modules(model, spec_of(model)) == sum(WHOLE.values()) - 2  # its layer stays, too
    assert model.get_submodule(path) is other


def test_a_layer_that_does_a_little_more_stays():
    model = build("llama")
    layer = model.model.layers[1]
    forward = layer.forward
    layer.forward = lambda *arguments, **keywords: forward(*arguments, **keywords) * 1.001
    assert fuse_modules(model, spec_of(model)) == sum(WHOLE.values()) - 1
    assert model.model.layers[1] is layer


def test_a_model_that_then_says_something_else_gets_all_its_modules_back(
    monkeypatch: pytest.MonkeyPatch,
):
    model = build("llama")
    before = list(model.named_modules())
    layer = type(model.model.layers[0])
    forward = layer.forward

    def looking(self: Any, *arguments: Any, **keywords: Any) -> Any:
        hidden = forward(self, *arguments, **keywords)
        return -hidden if isinstance(self.mlp, FusedGatedMLP) else hidden

    monkeypatch.setattr(layer, "forward", looking)
    assert fuse_modules(model, spec_of(model)) == 0
    assert list(model.named_modules()) == before
