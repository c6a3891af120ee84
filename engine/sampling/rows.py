"""What one row of logits needs to become a token."""

from collections.abc import Iterable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from engine.model_runner import ModelRunner
from engine.request import Request
from engine.sampling.bans import completed_by
from engine.sampling.bias import LogitBias
from engine.sampling.grammar_masks import GrammarMasks
from engine.sampling.masks import mask_of
from engine.sampling.params import SamplingParams
from engine.sampling.penalties import TokenCounts
from engine.stopping import banned_token_ids
from engine.token_mask import TokenMaskError


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRow:
    """One row. What is None or empty costs its batch nothing."""

    params: SamplingParams
    position: int  # absolute position of the token to be sampled
    choice_index: int = 0
    token_mask: torch.Tensor | None = None  # [vocab] bool, true: may come
    banned_token_ids: tuple[int, ...] = ()  # may not come now
    bias: LogitBias | None = None
    token_counts: TokenCounts | None = None


class _Prepared:
    """One request's parameters laid out once, at its first token here."""

    def __init__(self, request: Request, *, vocab_size: int, device: torch.device) -> None:
        params = request.sampling_params
        ids = params.allowed_token_ids
        self.mask = mask_of(ids, vocab_size, device) if ids else None
        self.bias = LogitBias(params.logit_bias) if params.logit_bias else None
        prompt = request.token_ids[: request.num_prompt_tokens]
        self.token_counts = TokenCounts(params, prompt) if params.has_penalties else None


class RowMaker:
    """Owns what was made of the parameters of running requests; it goes with the request.

    Invariant: a row depends on its request's parameters and tokens alone, so it is the same after a
    preemption, and on another worker.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._eos_token_ids = runner.eos_token_ids
        self._vocab_size = runner.vocab_size
        self._device = runner.device
        self._prepared: WeakKeyDictionary[Request, _Prepared] = WeakKeyDictionary()
        self._grammar_masks = GrammarMasks()

    def start(self, requests: Iterable[Request]) -> None:
        """Begin what `make` needs and what can be done while the forward runs."""
        self._grammar_masks.start(requests)

    def make(self, request: Request) -> SamplingRow:
        """Return the row of the request's next token."""
        params = request.sampling_params
        prepared = self._prepared.get(request)
        if prepared is None:
            prepared = _Prepared(request, vocab_size=self._vocab_size, device=self._device)
            self._prepared[request] = prepared
        banned = banned_token_ids(request, self._eos_token_ids)
        if params.bad_words:
            output = request.token_ids[request.num_prompt_tokens :]
            banned += tuple(completed_by(params.bad_words, output))
        counts = prepared.token_counts
        return SamplingRow(
            params=params,
            position=request.num_tokens,
            choice_index=request.choice_index,
            token_mask=self._token_mask(request, prepared),
            banned_token_ids=banned,
            bias=prepared.bias,
            token_counts=counts.update(request.token_ids) if counts is not None else None,
        )

    def _token_mask(self, request: Request, prepared: _Prepared) -> torch.Tensor | None:
        if request.new_token_mask is None:
            return prepared.mask
        mask = torch.from_numpy(self._grammar_masks.take(request)).to(self._device)
        if prepared.mask is not None:
            mask = mask & prepared.mask
            if not bool(mask.any()):
                raise TokenMaskError("allowed_token_ids has no token that its grammar allows")
        return mask
