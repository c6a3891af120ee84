"""Turns a phase of a contract into the requests it sends."""

import itertools
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

from load_generator import arrivals
from load_generator.contract import Contract, ContractError, Phase, Tenant
from load_generator.planned_request import PlannedRequest
from load_generator.prompts import PromptMaker
from sim.trace import Trace, TraceRequest, read_trace

SLOW = "slow readers"


def make_plan(contract: Contract, phase: Phase) -> list[PlannedRequest]:
    """All requests of the phase, in the order they are due; the same for the same seed."""
    rng = random.Random(f"{contract.seed}/{phase.title}")
    planner = _Planner(contract, phase, rng)
    return planner.replay(_read(phase)) if phase.trace is not None else planner.make()


class _Planner:
    def __init__(self, contract: Contract, phase: Phase, rng: random.Random) -> None:
        self._contract = contract
        self._phase = phase
        self._rng = rng
        self._prompts = PromptMaker(contract.prompts, contract.token_ids)
        self._prefix = self._prompts.draw(phase.shared_prefix_tokens, rng)
        self._keys = {tenant.name: _key_of(tenant) for tenant in phase.tenants}

    def make(self) -> list[PlannedRequest]:
        """Requests of drawn lengths."""
        due = _due(self._phase, self._rng)
        return [self._draw(due_s) for due_s in itertools.islice(due, self._phase.requests)]

    def replay(self, trace: Trace) -> list[PlannedRequest]:
        """Requests of a trace: its lengths, and equal tokens where its block ids are equal."""
        recorded = self._phase.arrivals == "recorded"
        due = itertools.repeat(0.0) if recorded else _due(self._phase, self._rng)
        start_s = trace.requests[0].arrived_s
        return [
            self._plan(
                each.arrived_s - start_s if recorded else due_s,
                self._tokens_of(each, trace.block_tokens),
                each.num_output_tokens,
            )
            for each, due_s in zip(trace.requests, due, strict=False)
        ]

    def _tokens_of(self, request: TraceRequest, block_tokens: int) -> list[Any]:
        """A block's id is the seed of its tokens."""
        tokens: list[Any] = []
        for block_id in request.block_ids:
            seeded = random.Random(f"{self._contract.seed}/{block_id}")
            tokens += self._prompts.draw(block_tokens, seeded)
        missing = request.num_prompt_tokens - len(tokens)
        tokens += self._prompts.draw(max(missing, 0), self._rng)
        return tokens[: request.num_prompt_tokens]

    def _draw(self, due_s: float) -> PlannedRequest:
        tenant = self._draw_tenant()
        prompt_tokens = (tenant and tenant.prompt_tokens) or self._phase.prompt_tokens
        output_tokens = (tenant and tenant.output_tokens) or self._phase.output_tokens
        own = self._prompts.draw(prompt_tokens.draw(self._rng), self._rng)
        num_output_tokens = output_tokens.draw(self._rng)
        return self._plan(due_s, [*self._prefix, *own], num_output_tokens, tenant)

    def _draw_tenant(self) -> Tenant | None:
        tenants = self._phase.tenants
        if not tenants:
            return None
        return self._rng.choices(tenants, weights=[tenant.share for tenant in tenants])[0]

    def _plan(
        self,
        due_s: float,
        tokens: Sequence[Any],
        num_output_tokens: int,
        tenant: Tenant | None = None,
    ) -> PlannedRequest:
        phase, rng = self._phase, self._rng
        is_slow = rng.random() < phase.slow_share
        is_cancelled = num_output_tokens > 1 and rng.random() < phase.cancel_share
        fields: dict[str, Any] = {
            "model": self._contract.model,
            **self._prompts.fields(tokens),
            "max_tokens": num_output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if tenant is not None and tenant.priority is not None:
            fields["priority"] = tenant.priority
        group = "" if tenant is None else tenant.name
        key = self._keys.get(group, "")
        return PlannedRequest(
            due_s=due_s,
            body=body_of(fields, self._contract.extra_body),
            num_prompt_tokens=len(tokens),
            num_output_tokens=num_output_tokens,
            group=SLOW if is_slow else group,
            headers={"authorization": f"Bearer {key}"} if key else {},
            read_tokens_per_s=phase.slow_tokens_per_s if is_slow else None,
            cancel_after_tokens=rng.randrange(1, num_output_tokens) if is_cancelled else None,
            resends=is_cancelled and rng.random() < phase.resend_share,
            retries=phase.retries,
        )


def body_of(fields: Mapping[str, Any], extra: Mapping[str, Any]) -> bytes:
    """The JSON of a request; `extra` wins, and null takes a field away."""
    laid = {**fields, **extra}
    return orjson.dumps({name: value for name, value in laid.items() if value is not None})


def _due(phase: Phase, rng: random.Random) -> Iterator[float]:
    if phase.rate_per_s is None:
        return itertools.repeat(0.0)
    if phase.arrivals == "fixed":
        return arrivals.fixed(phase.rate_per_s)
    return arrivals.poisson(phase.rate_per_s, rng)


def _key_of(tenant: Tenant) -> str:
    if not tenant.api_key_env:
        return ""
    key = os.environ.get(tenant.api_key_env, "")
    if not key:
        raise ContractError(
            f"tenant {tenant.name}: the environment has no {tenant.api_key_env} with its key"
        )
    return key


def _read(phase: Phase) -> Trace:
    """The trace, at the asked rate and size."""
    assert phase.trace is not None
    trace = read_trace(phase.trace).first(phase.requests).scaled(phase.token_scale)
    if phase.max_tokens is not None:
        trace = trace.within(phase.max_tokens)
    if phase.arrivals == "recorded" and phase.rate_per_s is not None:
        trace = trace.at_rate(phase.rate_per_s)
    return trace
