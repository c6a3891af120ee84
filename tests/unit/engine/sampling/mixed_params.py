"""One request for each thing a client can ask of a sampler, and one for all of it."""

from typing import Any

MIXED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "seed": 1},
    "filtered": {"temperature": 1.3, "seed": 2, "top_k": 60, "top_p": 0.95, "min_p": 0.001},
    "penalised": {
        "temperature": 0.9,
        "seed": 3,
        "repetition_penalty": 1.4,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.4,
    },
    "greedy-penalised": {"temperature": 0.0, "repetition_penalty": 1.5, "frequency_penalty": 1.0},
    "biased": {"temperature": 1.0, "seed": 4, "logit_bias": {7: 4.0, 9: 3.0, 20: -50.0}},
    "banned": {
        "temperature": 1.0,
        "seed": 5,
        "logit_bias": {7: 9.0, 9: 9.0},
        "bad_words": ((7, 9), (9, 9), (11,)),
    },
    "allowed": {"temperature": 1.0, "seed": 6, "allowed_token_ids": tuple(range(30, 60))},
    "held": {
        "temperature": 1.0,
        "seed": 7,
        "ignore_eos": False,
        "min_tokens": 6,
        "stop_token_ids": tuple(range(3, 160)),
    },
    "told": {"temperature": 1.0, "seed": 8, "num_logprobs": 3},
    "all": {
        "temperature": 1.1,
        "seed": 9,
        "top_p": 0.98,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "logit_bias": {7: 2.0},
        "bad_words": ((7, 9),),
        "allowed_token_ids": tuple(range(3, 200)),
        "min_tokens": 4,
        "num_logprobs": 2,
    },
}
