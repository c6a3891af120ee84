"""Gemma 3 from a GGUF file: weights, tokenizer and configuration of a normal checkpoint.

transformers can read the same file, but takes minutes over its vocabulary of 262,144 pieces. That
both make the same checkpoint, bit for bit, was checked when this was written.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import Gemma3TextConfig, GenerationConfig, PreTrainedTokenizerFast

from cluster.gguf_file import GGUFFile

_CONTROL, _USER_DEFINED = 3, 4  # kinds of pieces that are no result of merging
_SPACE = "▁"
_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
_IN_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(gguf: Path, directory: Path) -> None:
    """Write the checkpoint into an existing directory."""
    file = GGUFFile(gguf)
    config = _config(file.fields)
    config.save_pretrained(directory)
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    generation: Any = GenerationConfig
    generation(**{name: getattr(config, name) for name in ids}).save_pretrained(directory)
    _tokenizer(file.fields).save_pretrained(directory)
    weights = {_weight_name(name): _weight(name, values) for name, values in file.tensors()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def _config(fields: dict[str, Any]) -> Any:
    return Gemma3TextConfig(
        architectures=["Gemma3ForCausalLM"],
        vocab_size=len(fields["tokenizer.ggml.tokens"]),
        hidden_size=fields["gemma3.embedding_length"],
        intermediate_size=fields["gemma3.feed_forward_length"],
        num_hidden_layers=fields["gemma3.block_count"],
        num_attention_heads=fields["gemma3.attention.head_count"],
        num_key_value_heads=fields["gemma3.attention.head_count_kv"],
        head_dim=fields["gemma3.attention.key_length"],
        max_position_embeddings=fields["gemma3.context_length"],
        sliding_window=fields["gemma3.attention.sliding_window"],
        rms_norm_eps=fields["gemma3.attention.layer_norm_rms_epsilon"],
        query_pre_attn_scalar=fields["gemma3.attention.key_length"],
        dtype=torch.bfloat16,
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
        pad_token_id=fields["tokenizer.ggml.padding_token_id"],
    )


def _weight_name(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    match = _LAYER.fullmatch(name)
    assert match is not None, name
    layer, rest = match.groups()
    return f"model.layers.{layer}.{_IN_LAYER[rest.removesuffix('.weight')]}.weight"


def _weight(name: str, values: np.ndarray[Any, Any]) -> torch.Tensor:
    # GGUF keeps a norm's factor, transformers what it adds to one.
    return torch.from_numpy(values - 1 if "norm" in name else values).to(torch.bfloat16)


def _tokenizer(fields: dict[str, Any]) -> Any:
    # Runs of spaces are written as such in GGUF; the model knows them as runs of U+2581.
    pieces = [piece.replace(" ", _SPACE) for piece in fields["tokenizer.ggml.tokens"]]
    kinds: list[int] = fields["tokenizer.ggml.token_type"]
    vocabulary = {piece: token_id for token_id, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary, _merges(vocabulary), unk_token="<unk>", fuse_unk=True, byte_fallback=True
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_tokens(
        [
            AddedToken(piece, normalized=False, special=kind == _CONTROL)
            for piece, kind in zip(pieces, kinds, strict=True)
            if kind in (_CONTROL, _USER_DEFINED) and not piece.startswith(_SPACE)
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos>:1 $B:1", special_tokens=[("<bos>", 2)]
    )
    fast: Any = PreTrainedTokenizerFast
    return fast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        model_max_length=fields["gemma3.context_length"],
        clean_up_tokenization_spaces=False,
    )


def _merges(vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Every way to put a piece together from two others; pieces stand in the order of merging."""
    return [
        (piece[:cut], piece[cut:])
        for piece in vocabulary
        for cut in range(len(piece) - 1, 0, -1)
        if piece[:cut] in vocabulary and piece[cut:] in vocabulary
    ]
