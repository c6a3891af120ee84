"""Counts a model's parameters from its configuration."""

from dataclasses import dataclass

from plan.attention import head_dim, num_kv_heads
from plan.model_config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Numbers of parameters. All of them together are the model."""

    table: int  # vectors of tokens; also the head where that is tied to it
    head: int  # 0 when tied
    matrices: int  # of linear layers, which every token passes
    experts: int  # of all experts of all layers
    others: int  # norms, biases, routers, learnt positions
    active_experts: int  # those that one token passes

    @property
    def total(self) -> int:
        """Every one of them, tied ones once."""
        return self.table + self.head + self.matrices + self.experts + self.others

    @property
    def active(self) -> int:
        """Multiplied with each token, head and table aside."""
        return self.matrices + self.active_experts


@dataclass(slots=True)
class _Tally:
    matrices: int = 0
    experts: int = 0
    others: int = 0
    active_experts: int = 0

    def add_linear(self, num_in: int, num_out: int, *, has_bias: bool) -> None:
        self.matrices += num_in * num_out
        self.others += num_out * has_bias


def count_parameters(config: ModelConfig) -> Parameters:
    """Exact for the families known; ValueError where a needed number is missing."""
    family = config.family
    hidden, vocabulary = config.number("hidden_size"), config.number("vocab_size")
    width = int(config.get("word_embed_proj_dim", hidden))  # of a token's vector
    tally = _Tally()
    for layer in range(config.number("num_hidden_layers")):
        if family.is_latent:
            _add_latent_attention(tally, config)
        else:
            _add_attention(tally, config)
        if _has_experts(config, layer):
            _add_experts(tally, config)
        else:
            mlp_width = int(config.get(family.mlp_width, 4 * hidden))
            _add_mlp(tally, config, mlp_width, family.mlp_bias)
        tally.others += family.num_norms * family.norm_vectors * hidden
    tally.others += family.norm_vectors * hidden + vocabulary * family.head_bias
    tally.matrices += 2 * hidden * width * (width != hidden)
    if family.positions is not None:
        tally.others += (config.number("max_position_embeddings") + family.positions) * hidden
    return Parameters(
        table=vocabulary * width,
        head=0 if config.get("tie_word_embeddings", False) else vocabulary * width,
        matrices=tally.matrices,
        experts=tally.experts,
        others=tally.others,
        active_experts=tally.active_experts,
    )


def _add_attention(tally: _Tally, config: ModelConfig) -> None:
    family, hidden, width = config.family, config.number("hidden_size"), head_dim(config)
    num_heads, num_kv = config.number("num_attention_heads"), num_kv_heads(config)
    has_bias = config.has(family.qkv_bias)
    for heads in (num_heads, num_kv, num_kv):
        tally.add_linear(hidden, heads * width, has_bias=has_bias)
    tally.add_linear(num_heads * width, hidden, has_bias=config.has(family.out_bias))
    if config.has(family.query_key_norm):
        heads = 2 if family.is_norm_per_head else num_heads + num_kv
        tally.others += heads * width * family.norm_vectors
    tally.others += num_heads * family.has_sinks


def _add_latent_attention(tally: _Tally, config: ModelConfig) -> None:
    hidden, num_heads = config.number("hidden_size"), config.number("num_attention_heads")
    nope, rope = config.number("qk_nope_head_dim"), config.number("qk_rope_head_dim")
    rank, value = config.number("kv_lora_rank"), config.number("v_head_dim")
    has_bias = config.has("attention_bias")
    if query_rank := config.get("q_lora_rank"):
        tally.add_linear(hidden, query_rank, has_bias=has_bias)
        tally.add_linear(query_rank, num_heads * (nope + rope), has_bias=False)
        tally.others += query_rank
    else:
        tally.add_linear(hidden, num_heads * (nope + rope), has_bias=False)
    tally.add_linear(hidden, rank + rope, has_bias=has_bias)
    tally.others += rank
    tally.add_linear(rank, num_heads * (nope + value), has_bias=False)
    tally.add_linear(num_heads * value, hidden, has_bias=has_bias)


def _add_mlp(tally: _Tally, config: ModelConfig, width: int, bias: bool | str) -> None:
    hidden, has_bias = config.number("hidden_size"), config.has(bias)
    tally.add_linear(hidden, width, has_bias=has_bias)
    if config.family.is_gated:
        tally.add_linear(hidden, width, has_bias=has_bias)
    tally.add_linear(width, hidden, has_bias=has_bias)


def _has_experts(config: ModelConfig, layer: int) -> bool:
    if not config.family.has_experts or layer < config.get("first_k_dense_replace", 0):
        return False
    is_dense = layer in config.get("mlp_only_layers", ())
    return not is_dense and (layer + 1) % config.get("decoder_sparse_step", 1) == 0


def _add_experts(tally: _Tally, config: ModelConfig) -> None:
    family, hidden = config.family, config.number("hidden_size")
    num_experts, width = config.number("num_experts"), config.number(family.expert_width)
    bias = (2 * width + hidden) * family.expert_bias
    expert = 3 * hidden * width + bias
    tally.experts += num_experts * expert
    tally.active_experts += config.number("num_experts_per_tok") * expert
    tally.others += num_experts * (hidden + family.expert_bias)  # the router
    if shared := config.get("n_shared_experts"):
        _add_mlp(tally, config, shared * width, bias=False)
    if family.shared_expert_width:
        _add_mlp(tally, config, config.number(family.shared_expert_width), bias=False)
        tally.add_linear(hidden, 1, has_bias=False)  # its gate
