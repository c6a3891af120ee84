"""`relevo plan`: what a model needs and gives on some hardware, before anything is loaded."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from rich.console import Console

from cluster import rooms
from cluster.config import ClusterConfig, load_config
from cluster.model_source import HUB_TIMEOUT_S, is_hub_id
from plan.model_config import ModelConfig, read_model_config
from plan.plan import Plan, Site, make_plan
from plan.plots import draw_plan
from plan.report import show
from plan.split import Work
from sim.devices import load_device
from sim.hardware import read_measured

WIDE = 140  # characters of a pipe, which has none


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """What was asked for, as the command line gives it."""

    model: str
    config: Path | None
    assignments: Sequence[str]
    hardware: str
    measured: Path | None
    workers: int
    num_input_tokens: int
    num_output_tokens: int
    tpot_ms: float
    price_per_hour: float | None
    as_json: bool
    plot: Path | None


def run(settings: PlanSettings) -> int:
    """Plan and print; the exit status is 2 when the question or the configuration is wrong."""
    try:
        plan = _plan(settings)
        if settings.plot is not None:
            draw_plan(plan, settings.plot)
    except ValueError as error:
        sys.stderr.write(f"relevo plan: {error}\n")
        return 2
    if settings.as_json:
        body = orjson.dumps(plan.to_dict(), option=orjson.OPT_INDENT_2)
        sys.stdout.write(body.decode() + "\n")
    else:
        show(plan, Console() if sys.stdout.isatty() else Console(width=WIDE))
    return 0


def _plan(settings: PlanSettings) -> Plan:
    assignments = list(settings.assignments)
    if settings.model:
        assignments.append(f"model.path={settings.model}")
    config = load_config(settings.config, assignments=assignments)
    device = load_device(settings.hardware, num_cores=_cores_per_engine(config))
    return make_plan(
        _model_config(config.model.path),
        prefill=rooms.engine_config(config, config.prefill, num_threads=1),
        decode=rooms.engine_config(config, config.decode, num_threads=1),
        work=Work(
            num_input_tokens=settings.num_input_tokens,
            num_output_tokens=settings.num_output_tokens,
            tpot_s=settings.tpot_ms / 1e3,
        ),
        site=Site(
            device=device,
            num_workers=settings.workers,
            measured={} if settings.measured is None else read_measured(settings.measured),
            price_per_hour=settings.price_per_hour,
        ),
    )


def _cores_per_engine(config: ClusterConfig) -> int:
    """Of this machine, as `relevo serve` would share them out."""
    return config.engine.num_threads or rooms.threads_per_engine(
        config, node_cpus=[float(len(os.sched_getaffinity(0)))]
    )


def _model_config(path: str) -> ModelConfig:
    if not is_hub_id(path):
        return read_model_config(Path(path).expanduser())
    try:
        file = hf_hub_download(path, "config.json", etag_timeout=HUB_TIMEOUT_S)
    except (OSError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"{path} is no directory, and its config.json cannot be had from the hub: {reason}"
        ) from error
    return read_model_config(Path(file))
