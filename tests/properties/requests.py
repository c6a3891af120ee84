"""Random requests that are right, as a client writes them."""

from typing import Any

from hypothesis import strategies as st

from api.openai.fields import COMPLETION_FIELDS

VOCAB_SIZE = 320
IDS = st.integers(3, VOCAB_SIZE - 1)  # no special token

# Values for every parameter that may change an answer; those not served yet are left out.
_PARAMETERS: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.sampled_from([0.0, 0.0, 0.7, 1.5]),
    "top_k": st.integers(-1, 50),
    "top_p": st.floats(0.1, 1.0),
    "min_p": st.floats(0.0, 0.2),
    "min_tokens": st.integers(0, 2),
    "stop": st.lists(st.sampled_from(["e", "th", "a b", "qu"]), min_size=1, max_size=2),
    "stop_token_ids": st.lists(IDS, max_size=3),
    "repetition_penalty": st.floats(0.5, 2.0),
    "presence_penalty": st.floats(-2.0, 2.0),
    "frequency_penalty": st.floats(-2.0, 2.0),
    "logit_bias": st.dictionaries(IDS.map(str), st.floats(-100, 100), max_size=3),
    "allowed_token_ids": st.lists(IDS, min_size=20, max_size=40, unique=True),
    "include_stop_str_in_output": st.booleans(),
    "logprobs": st.integers(0, 3),
    "priority": st.integers(-1, 1),
    "n": st.integers(1, 2),
}
PARAMETERS = {name: values for name, values in _PARAMETERS.items() if name in COMPLETION_FIELDS}

PROMPTS = st.lists(IDS, min_size=1, max_size=60) | st.sampled_from(
    # Around the ends of blocks of 8, with the same beginning: for the prefix cache.
    [[7 + position % 5 for position in range(length)] for length in (7, 8, 9, 16, 40)]
)


@st.composite
def bodies(draw: st.DrawFn, **fixed: Any) -> dict[str, Any]:
    """A completion's body whose answer depends on itself alone: it always has a seed."""
    names = draw(st.lists(st.sampled_from(sorted(PARAMETERS)), max_size=5, unique=True))
    return {
        "prompt": draw(PROMPTS),
        "max_tokens": draw(st.integers(2, 10)),
        "seed": draw(st.integers(-(2**63), 2**63 - 1)),
        "ignore_eos": draw(st.booleans()),
        **{name: draw(PARAMETERS[name]) for name in names},
        **fixed,
    }
