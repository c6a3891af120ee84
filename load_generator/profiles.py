"""The load profiles: what a phase of each is unless the contract says otherwise.

Lengths are those a small model answers on a few cores; a contract for a real one gives its own.
"""

from collections.abc import Mapping
from typing import Any, Final

_SHORT_PROMPT: Final = {"median": 64, "spread": 0.5, "low": 16, "high": 256}
_LONG_PROMPT: Final = {"median": 1000, "spread": 0.4, "low": 512, "high": 2000}
_SHORT_OUTPUT: Final = {"median": 16, "spread": 0.5, "low": 4, "high": 64}
_LONG_OUTPUT: Final = {"median": 128, "spread": 0.4, "low": 64, "high": 400}
_MIXED: Final = {"prompt_tokens": _SHORT_PROMPT, "output_tokens": _LONG_OUTPUT}

PROFILES: Final[Mapping[str, Mapping[str, Any]]] = {
    "short-short": {"prompt_tokens": _SHORT_PROMPT, "output_tokens": _SHORT_OUTPUT},
    "long-short": {"prompt_tokens": _LONG_PROMPT, "output_tokens": _SHORT_OUTPUT},
    "short-long": _MIXED,
    "tenants": {
        "prompt_tokens": _SHORT_PROMPT,
        "output_tokens": _SHORT_OUTPUT,
        "tenants": [
            {"name": "interactive", "share": 2, "priority": 0},
            {"name": "standard", "share": 2, "priority": 5},
            {"name": "bulk", "share": 1, "priority": 10, "prompt_tokens": _LONG_PROMPT},
        ],
    },
    "slow-readers": {**_MIXED, "slow_share": 0.25},
    "disturbed": {
        **_MIXED,
        "cancel_share": 0.2,
        "resend_share": 0.5,
        "retries": 3,
        "lose_worker": "decode",
    },
    # The trace has its own lengths.
    "replay": {"prompt_tokens": 1, "output_tokens": 1, "arrivals": "recorded"},
}
