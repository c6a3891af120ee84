"""Computes in float32 with weights that stay in bfloat16.

Every bfloat16 number is a float32 number, so nothing is rounded: the products are those of a model
loaded in float32, while the weights remain the pages of their file, shared by all workers of a
node, and a decode step reads half the bytes.

Once it is told to round, the inputs of products are rounded to bfloat16 on CPUs that multiply such
numbers faster; sums and all else stay float32.
"""

from pathlib import Path
from typing import Any

import torch
from accelerate.big_modeling import init_empty_weights
from safetensors import safe_open
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM


class WideningLinear(nn.Module):
    """`nn.Linear` on float32 with a bfloat16 weight, see `engine/native/linear.h`."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.weight = linear.weight  # [out_features, in_features] bfloat16
        self.bias = linear.bias
        self.rounds = False  # its inputs to bfloat16, where this CPU has products of that

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[.., in_features] -> [.., out_features], both float32."""
        result: torch.Tensor = torch.ops.relevo.widening_linear.default(
            hidden, self.weight, self.bias, self.rounds
        )
        return result


class WideningEmbedding(nn.Module):
    """`nn.Embedding`, or Gemma's scaled one, that gives float32 rows of a bfloat16 table."""

    embed_scale: torch.Tensor | None

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight  # [num_embeddings, embedding_dim] bfloat16
        self.register_buffer("embed_scale", _embed_scale(embedding), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[..] -> [.., embedding_dim] float32."""
        rows = functional.embedding(ids, self.weight).float()
        return rows if self.embed_scale is None else rows * self.embed_scale


def _embed_scale(embedding: nn.Embedding) -> torch.Tensor | None:
    """What the rows are multiplied by, [] float32; None for torch's own class."""
    scale = dict(embedding.named_buffers()).get("embed_scale")
    return None if scale is None else scale.float()


def is_all_bfloat16(directory: Path) -> bool:
    """Whether every tensor of a safetensors checkpoint is stored in bfloat16."""
    files = sorted(directory.glob("*.safetensors"))
    return bool(files) and all(_dtypes(file) <= {"BF16"} for file in files)


def is_mostly_linear(model: Any) -> bool:
    """Whether nearly all weights are those of plain products and tables: no experts, say."""
    own = {id(each): each for each in model.parameters()}
    plain = {
        id(module.weight)
        for module in model.modules()
        if type(module) is nn.Linear or _is_plain_table(module)
    }
    num_plain: int = sum(each.numel() for key, each in own.items() if key in plain)
    return bool(num_plain > 0.9 * sum(each.numel() for each in own.values()))


def keep_narrow(model: Any) -> None:
    """Let a model that was loaded in bfloat16 compute in float32, in place."""
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear:
            model.set_submodule(name, WideningLinear(module))
        elif _is_plain_table(module):
            model.set_submodule(name, WideningEmbedding(module))
    for module in model.modules():
        is_narrow = isinstance(module, (WideningLinear, WideningEmbedding))
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not (is_narrow and name == "weight"):
                widened = nn.Parameter(parameter.float(), requires_grad=False)
                setattr(module, name, widened)
    _restore_buffers(model)


def is_narrow(model: Any) -> bool:
    """Whether it was made to compute in float32 with bfloat16 weights."""
    return any(isinstance(module, WideningLinear) for module in model.modules())


def round_inputs(model: Any) -> None:
    """From now on products round their inputs; to be said once modules were compared and fused."""
    for module in model.modules():
        if isinstance(module, WideningLinear):
            module.rounds = True
        elif hasattr(module, "round_inputs"):
            module.round_inputs()


def _is_plain_table(module: nn.Module) -> bool:
    """Whether it looks rows up, and scales them at most."""
    if not isinstance(module, nn.Embedding) or module.max_norm is not None:
        return False
    return type(module) is nn.Embedding or _embed_scale(module) is not None


def _restore_buffers(model: Any) -> None:
    """Constants that the model computed for itself were rounded; take those of a float32 model."""
    with init_empty_weights(include_buffers=False):
        skeleton = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    persistent = set(model.state_dict())
    exact = dict(skeleton.named_buffers())
    for name, buffer in list(model.named_buffers()):
        owner, _, own_name = name.rpartition(".")
        stored = buffer.float() if buffer.is_floating_point() else buffer
        value = stored if name in persistent else exact[name]
        setattr(model.get_submodule(owner), own_name, value)


def _dtypes(file: Path) -> set[str]:
    """Names of the dtypes in a safetensors file; only its header is read."""
    with safe_open(file, framework="pt") as tensors:
        return {tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118 - it is no mapping
