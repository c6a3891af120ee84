"""Products of inputs that are rounded to bfloat16: by tiles, and where a process may use none."""

import shutil
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from engine.native.library_file import cpu_flags
from engine.widening import WideningLinear
from tests.unit.engine.rounding_process import rounding_process

pytestmark = pytest.mark.skipif(
    shutil.which("c++") is None, reason="no C++ compiler on this machine"
)

ACTIVATIONS = (
    functional.silu,
    partial(functional.gelu, approximate="tanh"),
    functional.gelu,
)


@pytest.fixture(scope="module", params=[True, False], ids=["tiles", "no tiles"])
def process(request: pytest.FixtureRequest) -> Iterator[ProcessPoolExecutor]:
    with rounding_process(may_use_tiles=request.param) as process:
        yield process


def _layer(shape: tuple[int, int], has_bias: bool) -> WideningLinear:
    torch.manual_seed(0)
    layer = WideningLinear(nn.Linear(*shape, bias=has_bias, dtype=torch.bfloat16))
    if has_bias:
        layer.bias = nn.Parameter(layer.bias.float())
    layer.rounds = True
    return layer


def _multiplies_as_bfloat16(num_tokens: int, shape: tuple[int, int]) -> bool:
    layer = _layer(shape, has_bias=True)
    hidden = torch.randn(1, num_tokens, shape[0])
    rounds = shape[0] % 32 == 0 and "avx512_bf16" in cpu_flags().split()
    with torch.inference_mode():
        multiplied = (hidden.bfloat16() if rounds else hidden).double()
        truth = functional.linear(multiplied, layer.weight.double(), layer.bias.double())
        return torch.allclose(layer(hidden).double(), truth, rtol=1e-5, atol=1e-5)


# Outputs and tokens that do not fill a tile; the last shape is not one of tiles at all.
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5, 16, 17, 33, 130])
@pytest.mark.parametrize("shape", [(576, 192), (64, 7), (1024, 50), (32, 1), (50, 33)], ids=str)
def test_rounded_inputs_are_multiplied_as_bfloat16(
    process: ProcessPoolExecutor, num_tokens: int, shape: tuple[int, int]
):
    assert process.submit(_multiplies_as_bfloat16, num_tokens, shape).result()


def _counts_that_differ(shape: tuple[int, int]) -> list[int]:
    """Of how many tokens a product is another than that of each token alone, or of all."""
    layer = _layer(shape, has_bias=False)
    hidden = torch.randn(1300, shape[0])  # more than stays in the cache at once
    with torch.inference_mode():
        whole = layer(hidden)
        alone = torch.cat([layer(hidden[n : n + 1]) for n in range(40)])
        differ = [] if torch.equal(whole[:40], alone) else [1]
        counts = (2, 3, 4, 5, 6, 7, 16, 17, 40, 300)
        return differ + [n for n in counts if not torch.equal(layer(hidden[-n:]), whole[-n:])]


@pytest.mark.parametrize("shape", [(576, 192), (1536, 37)], ids=str)
def test_a_rounded_token_is_computed_alike_alone_and_among_others(
    process: ProcessPoolExecutor, shape: tuple[int, int]
):
    assert process.submit(_counts_that_differ, shape).result() == []


def _gates_as_products_do(activation: int, num_tokens: int, width: int) -> bool:
    torch.manual_seed(0)
    hidden = torch.randn(1, num_tokens, 64)
    gate, up = (torch.randn(width, 64).bfloat16() for _ in range(2))
    biases = torch.randn(2, width).unbind()
    products = torch.ops.relevo.linears(hidden, [gate, up], list(biases), rounds=True)
    gated = torch.ops.relevo.gated_linear(hidden, gate, up, *biases, activation, rounds=True)
    expected = ACTIVATIONS[activation](products[0]) * products[1]
    return torch.allclose(gated, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("activation", range(3))
@pytest.mark.parametrize("num_tokens", [1, 5, 40])
@pytest.mark.parametrize("width", [96, 41])
def test_rounded_gates_are_those_of_rounded_products(
    process: ProcessPoolExecutor, activation: int, num_tokens: int, width: int
):
    assert process.submit(_gates_as_products_do, activation, num_tokens, width).result()


def _some_outputs() -> torch.Tensor:
    """[tokens, outputs] of numbers that come out differently in another order of sums."""
    layer = _layer((576, 192), has_bias=False)
    with torch.inference_mode():
        return layer(torch.randn(20, 576))


@pytest.mark.skipif("amx_bf16" not in cpu_flags().split(), reason="this CPU has no tiles")
def test_a_process_that_may_use_no_tiles_multiplies_in_another_way():
    outputs = []
    for may_use_tiles in (True, False):
        with rounding_process(may_use_tiles=may_use_tiles) as process:
            outputs.append(process.submit(_some_outputs).result().clone())
    assert torch.allclose(*outputs, rtol=1e-4, atol=1e-5)
    assert not torch.equal(*outputs)
