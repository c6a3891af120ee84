"""Puts a plan together: memory, speed, split and cost of one model on one kind of device."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from engine.config import EngineConfig
from plan.memory import MemoryPlan, plan_memory
from plan.model_config import ModelConfig
from plan.parameters import Parameters, count_parameters
from plan.speed import Speed, plan_speed
from plan.split import Costs, Split, Work, plan_costs, plan_split
from sim.devices import Device

CONTEXT_LENS = (1024, 4096, 8192, 32_768)


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where it shall run."""

    device: Device
    num_workers: int
    measured: Mapping[str, Any]  # step costs that take the place of the data sheet's
    price_per_hour: float | None = None  # of a worker


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextRow:
    """One length of requests, all of them as long."""

    context_len: int
    num_fitting: int  # by their blocks
    max_concurrency: int  # of those that run at once
    prefill_s: float
    prefill_tokens_per_s: float
    link_s: float  # the whole hand-over, on an idle link
    link_tail_s: float  # what of it is left once the prompt is computed
    single_tpot_s: float
    full_tpot_s: float  # with as many as run at once
    decode_tokens_per_s: float  # of one worker, then


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All that is said about a model."""

    source: str
    model_type: str
    parameters: Parameters
    prefill_memory: MemoryPlan
    decode_memory: MemoryPlan
    prefill_speed: Speed
    decode_speed: Speed
    contexts: tuple[ContextRow, ...]
    work: Work
    split: Split
    costs: Costs | None
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data; `hardware` is what `relevo sim --hardware` takes as a file."""
        memories = {"prefill": self.prefill_memory, "decode": self.decode_memory}
        return {
            "model": {
                "config": self.source,
                "model_type": self.model_type,
                "num_parameters": self.parameters.total,
                "num_active_parameters": self.parameters.active,
            },
            "memory": {
                pool: {
                    **asdict(memory),
                    "kv_bytes": memory.kv_bytes,
                    "max_concurrency": memory.num_fitting(memory.max_model_len),
                }
                for pool, memory in memories.items()
            },
            "contexts": [asdict(row) for row in self.contexts],
            "work": asdict(self.work),
            "split": {
                **asdict(self.split),
                "rate": self.split.rate,
                "aggregated_rate": self.split.aggregated_rate,
                "prefill_per_decode": self.split.prefill_per_decode,
            },
            "costs_per_million_tokens": None if self.costs is None else asdict(self.costs),
            "warnings": list(self.warnings),
            "hardware": asdict(self.decode_speed.hardware),
        }


def make_plan(
    config: ModelConfig, *, prefill: EngineConfig, decode: EngineConfig, work: Work, site: Site
) -> Plan:
    """ValueError in one line where the model, the work or the device cannot be."""
    parameters = count_parameters(config)

    def plan_pool(engine: EngineConfig) -> tuple[MemoryPlan, Speed]:
        memory = plan_memory(config, parameters, engine, site.device)
        return memory, plan_speed(
            config, parameters, engine, site.device, memory, measured=site.measured
        )

    prefill_memory, prefill_speed = plan_pool(prefill)
    memory, speed = plan_pool(decode)
    split = plan_split(work, prefill_speed, speed, memory, num_workers=site.num_workers)
    costs = None
    if site.price_per_hour is not None:
        costs = plan_costs(work, split, price_per_hour=site.price_per_hour)
    return Plan(
        source=config.source,
        model_type=config.model_type,
        parameters=parameters,
        prefill_memory=prefill_memory,
        decode_memory=memory,
        prefill_speed=prefill_speed,
        decode_speed=speed,
        contexts=tuple(
            _row(length, prefill_speed, speed, memory) for length in _context_lens(memory)
        ),
        work=work,
        split=split,
        costs=costs,
        warnings=tuple(_warnings(prefill_memory, memory, work, split)),
    )


def _context_lens(memory: MemoryPlan) -> list[int]:
    longest = memory.max_model_len
    return [*(length for length in CONTEXT_LENS if length < longest), longest]


def _row(context_len: int, prefill: Speed, decode: Speed, memory: MemoryPlan) -> ContextRow:
    prefill_s = prefill.prefill_s(context_len)
    concurrency = max(memory.max_concurrency(context_len), 1)
    full_tpot_s = decode.decode_step_s(concurrency, context_len)
    last_chunk = min(prefill.hardware.max_num_batched_tokens, context_len)
    return ContextRow(
        context_len=context_len,
        num_fitting=memory.num_fitting(context_len),
        max_concurrency=concurrency,
        prefill_s=prefill_s,
        prefill_tokens_per_s=context_len / prefill_s,
        link_s=prefill.link_s(context_len),
        link_tail_s=prefill.link_s(last_chunk),
        single_tpot_s=decode.decode_step_s(1, context_len),
        full_tpot_s=full_tpot_s,
        decode_tokens_per_s=concurrency / full_tpot_s,
    )


def _warnings(prefill: MemoryPlan, decode: MemoryPlan, work: Work, split: Split) -> list[str]:
    found = []
    pools = {"prefill": prefill, "decode": decode}
    if prefill == decode:
        pools = {"each worker": decode}
    for pool, memory in pools.items():
        if memory.step_bytes > memory.spare_bytes:
            found.append(
                f"{pool}: a step of long requests may need {memory.step_bytes / 1e9:.1f} GB, but "
                f"{max(memory.spare_bytes, 0.0) / 1e9:.1f} GB are left: lower engine.max_num_seqs, "
                f"model.max_model_len or engine.num_kv_blocks"
            )
    if split.decode.tpot_s > work.tpot_s:
        found.append(
            f"one request alone has {split.decode.tpot_s * 1e3:.1f} ms between its tokens, above "
            f"the objective of {work.tpot_s * 1e3:g} ms: no split can meet it"
        )
    return found
