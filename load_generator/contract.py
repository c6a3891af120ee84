"""An acceptance contract: which load a server must bear, and how well; read once, checked here.

model: smollm2-135m-instruct
slo:
  ttft_ms: {p50: 400, p99: 2000}
  tpot_ms: {p95: 80}
  error_rate: 0.01
phases:
  - profile: short-short
    requests: 100
    rate_per_s: 4
"""

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    ValidationError,
    model_validator,
)

from load_generator.lengths import Lengths
from load_generator.profiles import PROFILES

_PERCENTILE = re.compile(r"p(\d{1,2}(\.\d+)?|100)")
Share = Annotated[float, Field(ge=0, le=1)]


class ContractError(ValueError):
    """The contract cannot be used; the message is one line for the person who wrote it."""


def _check_percentile(name: str) -> str:
    if not _PERCENTILE.fullmatch(name):
        raise ValueError(f"{name!r} is no percentile; write p50, p99 or p99.9")
    return name


Limits = dict[Annotated[str, AfterValidator(_check_percentile)], PositiveFloat]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Slo(_Part):
    """What must hold of a phase; a latency counts from the moment its request was due."""

    ttft_ms: Limits = {}  # time to the first token
    tpot_ms: Limits = {}  # mean time of each later token of a request
    e2e_ms: Limits = {}  # time to the last token
    error_rate: Share | None = None  # failed requests over all that were not cancelled
    good_share: Share | None = None  # requests that are good ones, at least

    def longest(self, metric: str) -> float | None:
        """The limit of the highest percentile: what a good request keeps to, if anything."""
        limits: Limits = getattr(self, metric)
        return limits[max(limits, key=rank_of)] if limits else None


def rank_of(percentile: str) -> float:
    """`p99.9` -> 99.9."""
    return float(percentile.removeprefix("p"))


class Tenant(_Part):
    """Who sends a share of the requests."""

    name: str
    share: float = Field(default=1.0, gt=0)  # against the other tenants' shares
    priority: int | None = None  # lower is earlier; null = not sent
    api_key_env: str = ""  # environment variable that holds its key; empty = the common key
    prompt_tokens: Lengths | None = None  # null = the phase's
    output_tokens: Lengths | None = None


class Phase(_Part):
    """One load after the other; what it leaves out its profile says (`load_generator.profiles`)."""

    profile: Literal[
        "short-short", "long-short", "short-long", "tenants", "slow-readers", "disturbed", "replay"
    ]
    name: str = ""  # null = the profile's
    requests: int = Field(ge=1)
    arrivals: Literal["poisson", "fixed", "closed", "recorded"] = "poisson"
    rate_per_s: float | None = Field(default=None, gt=0)
    max_concurrency: int | None = Field(default=None, ge=1)  # the client's; waiting counts
    prompt_tokens: Lengths
    output_tokens: Lengths
    shared_prefix_tokens: int = Field(default=0, ge=0)  # the same ones before every prompt
    tenants: tuple[Tenant, ...] = ()
    slow_share: Share = 0.0  # of the requests, read slower than they are written
    slow_tokens_per_s: float = Field(default=2.0, gt=0)
    cancel_share: Share = 0.0  # of the requests, left by their client in the middle
    resend_share: Share = 0.0  # of those, asked again at once
    retries: int = Field(default=0, ge=0)  # of what was refused or broke, by the client
    lose_worker: Literal["", "prefill", "decode"] = ""  # the pool that loses one, half-way
    trace: Path | None = None  # request log, Mooncake .jsonl or Azure .csv
    token_scale: float = Field(default=1.0, gt=0)  # of the trace's lengths
    max_tokens: int | None = Field(default=None, ge=2)  # prompt and answer of the trace, together
    slo: Slo | None = None  # null = the contract's

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        needs_rate = self.arrivals in {"poisson", "fixed"}
        if needs_rate and self.rate_per_s is None:
            raise ValueError(f"arrivals {self.arrivals} need rate_per_s")
        if self.arrivals == "closed" and (self.max_concurrency is None or self.rate_per_s):
            raise ValueError("closed arrivals need max_concurrency and no rate_per_s")
        if (self.profile == "replay") != (self.trace is not None):
            raise ValueError("the profile replay, and only it, needs a trace")
        if (self.arrivals == "recorded") and self.trace is None:
            raise ValueError("recorded arrivals need a trace")
        return self

    @property
    def title(self) -> str:
        """What it is called in reports."""
        return self.name or self.profile


class Contract(_Part):
    """The whole file."""

    model: str
    revision: str = ""  # empty = any; else what the server's /version must say
    seed: int = 1
    prompts: Literal["ids", "text", "chat"] = "ids"  # how a prompt is sent
    token_ids: tuple[int, int] = (100, 300)  # random prompts are made of these, the last excluded
    extra_body: dict[str, Any] = {}  # laid over every request; null takes a field away
    warm_up_requests: int = Field(default=2, ge=0)  # of the first phase, one by one, not counted
    request_timeout_s: float = Field(default=600.0, gt=0)
    slo: Slo = Slo()
    phases: tuple[Phase, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        low, high = self.token_ids
        if not 0 <= low < high:
            raise ValueError(f"token_ids = [{low}, {high}] must be a range of ids, low first")
        titles = [phase.title for phase in self.phases]
        if twice := {title for title in titles if titles.count(title) > 1}:
            raise ValueError(f"two phases are called {min(twice)!r}; give one a name")
        return self

    @property
    def path(self) -> str:
        """The route that takes its prompts."""
        return "/v1/chat/completions" if self.prompts == "chat" else "/v1/completions"

    def slo_of(self, phase: Phase) -> Slo:
        """What must hold of this phase."""
        return self.slo if phase.slo is None else phase.slo


def read_contract(path: Path) -> Contract:
    """Read a YAML file; ContractError says what is wrong with it, and where."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ContractError(f"cannot read the contract {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ContractError(f"the contract {path} is not valid YAML: {reason}") from error
    return make_contract(tree, folder=path.parent)


def make_contract(tree: Any, *, folder: Path = Path()) -> Contract:
    """Check a tree of keys; a trace's path is relative to `folder`."""
    if not isinstance(tree, Mapping):
        raise ContractError(f"a contract is a table of keys, got {type(tree).__name__}")
    try:
        return Contract.model_validate(_with_profiles(tree, folder))
    except ValidationError as error:
        raise ContractError(f"contract: {_first_of(error)}") from error


def _with_profiles(tree: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Lay each phase over what its profile is."""
    phases = tree.get("phases")
    if not isinstance(phases, list):
        return dict(tree)
    return {**tree, "phases": [_with_profile(phase, folder) for phase in phases]}


def _with_profile(phase: Any, folder: Path) -> Any:
    if not isinstance(phase, Mapping):
        return phase
    laid = {**PROFILES.get(str(phase.get("profile")), {}), **phase}
    if isinstance(laid.get("trace"), str):
        laid["trace"] = folder / laid["trace"]
    return laid


def _first_of(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    place = ""
    for part in first["loc"]:
        place += f"[{part}]" if isinstance(part, int) else f".{part}" if place else str(part)
    reason = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        known = [name for part in (Contract, Phase, Slo, Tenant, Lengths) for name in _names(part)]
        close = difflib.get_close_matches(str(first["loc"][-1]), known, n=1, cutoff=0.5)
        reason = "unknown key" + (f"; did you mean {close[0]!r}?" if close else "")
        return f"{place}: {reason}"
    got = "" if isinstance(first["input"], Mapping | BaseModel) else f" (got {first['input']!r})"
    return f"{place}: {reason}{got}" if place else f"{reason}{got}"


def _names(part: type[BaseModel]) -> list[str]:
    return list(part.model_fields)
