"""What an engine can never serve, found before it costs anything."""

from collections.abc import Sequence

from engine.request import Request, RequestStatus

MAX_CHOICES = 1024  # bounds what one message can make an engine do


def validate_request(request: Request, *, vocab_size: int, max_model_len: int) -> None:
    """ValueError when the request can never be computed here."""
    if request.status is not RequestStatus.WAITING or request.block_ids:
        raise ValueError("Got a request that has run before but expected a new one")
    if not 1 <= request.num_prompt_tokens <= request.num_tokens:
        raise ValueError(
            f"Got {request.num_prompt_tokens = } but expected 1 to {request.num_tokens}"
        )
    if request.num_tokens >= max_model_len:
        raise ValueError(f"Got {request.num_tokens} tokens but expected fewer than {max_model_len}")
    if request.num_output_tokens >= request.sampling_params.max_tokens:
        raise ValueError(
            f"Got {request.num_output_tokens} output tokens but expected fewer than "
            f"{request.sampling_params.max_tokens = }"
        )
    if not 1 <= request.num_choices <= MAX_CHOICES or request.choice_index < 0:
        raise ValueError(f"Got {request.choices = } but expected 1 to {MAX_CHOICES} from 0 on")
    params = request.sampling_params
    if params.min_tokens > params.max_tokens:
        raise ValueError(f"Got {params.min_tokens = } but expected at most {params.max_tokens = }")
    _validate_ids("token id", request.token_ids, vocab_size)
    _validate_ids("stop token id", params.stop_token_ids, vocab_size)
    _validate_ids("allowed token id", params.allowed_token_ids, vocab_size)
    _validate_ids("token id in logit_bias", tuple(params.logit_bias), vocab_size)
    for word in params.bad_words:
        _validate_ids("token id in a bad word", word, vocab_size)


def validate_choices(
    request: Request, *, max_num_seqs: int, num_kv_blocks: int, block_size: int
) -> None:
    """ValueError when the choices can never run here together, as they do after the prompt."""
    if request.num_seqs > max_num_seqs:
        raise ValueError(
            f"Got {request.num_choices = } but expected at most {max_num_seqs = }, or fewer choices"
        )
    # Each has a block of its own from its first token on; before it they share all.
    if request.num_tokens // block_size + request.num_seqs > num_kv_blocks:
        raise ValueError(
            f"Got {request.num_tokens} tokens with {request.num_choices} choices but expected what "
            f"{num_kv_blocks} blocks of {block_size} tokens hold"
        )


def _validate_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        raise ValueError(f"Got a {name} outside 0 to {vocab_size - 1}")
