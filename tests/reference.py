"""The slow truth: what transformers' own generate() says, and how sure it was."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

# In float32 two ways to add the same numbers differ in the last bits; a greedy choice between two
# logits closer than this may fall either way. In float64 there is no such excuse.
TIE_LOGITS = 1e-4


@dataclass(frozen=True, slots=True)
class Truth:
    """Greedy tokens of one prompt and, for each, the lead of the best logit over the second."""

    token_ids: tuple[int, ...]
    leads: tuple[float, ...]

    def agrees_with(self, token_ids: Sequence[int], *, may_tie: bool) -> bool:
        """Whether these tokens are the same, up to the first near tie where ties count as one."""
        if tuple(token_ids) == self.token_ids:
            return True
        if not may_tie or len(token_ids) != len(self.token_ids):
            return False
        pairs = zip(self.token_ids, token_ids, strict=True)
        first = next(i for i, (ours, theirs) in enumerate(pairs) if ours != theirs)
        return self.leads[first] <= TIE_LOGITS


def generate_truth(
    model_path: Path, prompts: Mapping[str, list[int]], *, num_tokens: int, dtype: torch.dtype
) -> dict[str, Truth]:
    """Run each prompt alone through generate(), greedily and past any end-of-sequence token."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype)
    model.generation_config.eos_token_id = None  # nothing ends a sequence early
    return {name: _run_alone(model, prompt, num_tokens) for name, prompt in prompts.items()}


def _run_alone(model: torch.nn.Module, prompt: list[int], num_tokens: int) -> Truth:
    output = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=num_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = [logits[0].double().topk(2).values for logits in output.logits]
    return Truth(
        token_ids=tuple(output.sequences[0, len(prompt) :].tolist()),
        leads=tuple(float(first - second) for first, second in best),
    )
