"""The Ray cluster that is to be joined: whether it answers, and whether its nodes are alike."""

import importlib
import importlib.metadata
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil

from cluster import preflight
from cluster.config import ClusterConfig
from cluster.doctor_machine import GOOD_FILES, MIN_FILES, SHM_NEEDED
from cluster.finding import Finding, ok, problem, warning
from cluster.node_facts import NodeFacts, gather
from cluster.start_error import StartError

ANSWER_WITHIN_S = 30.0
CLOCKS_WITHIN_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What the nodes of a cluster said, and those that could not."""

    facts: list[NodeFacts]
    silent: dict[str, str]  # node -> why
    start_s: float  # by our clock, before any was asked
    end_s: float


def examine(config: ClusterConfig) -> Iterator[Finding]:
    """Ray's own state, then each node."""
    version = importlib.metadata.version("ray")
    if config.is_local:
        others = [each.pid for each in psutil.process_iter(["name"]) if each.name() == "raylet"]
        beside = f", beside that of pid {others[0]}" if others else ""
        yield ok("ray", f"{version}; a Ray of our own will be started{beside}")
        return
    try:
        preflight.check_ray_address(config.cluster.ray_address)
        survey = ask_nodes(config.cluster.ray_address)
    except StartError as error:
        yield problem("ray", str(error), "start Ray there, or correct cluster.ray_address")
        return
    yield ok(
        "ray", f"{version}; {len(survey.facts)} node(s) of {config.cluster.ray_address} answer"
    )
    yield from check_nodes(survey, gather("this machine"))


def ask_nodes(address: str) -> Survey:
    """Ask every node; StartError where Ray itself does not answer."""
    ray: Any = importlib.import_module("ray")  # takes seconds, and only here
    strategies: Any = importlib.import_module("ray.util.scheduling_strategies")
    start_s, facts, silent = time.time(), [], {}
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # Ray raises the plain class too
        raise StartError(f"cannot join the Ray cluster at {address}: {_last(error)}") from error
    try:
        asked = {}
        for node in ray.nodes():
            if node["Alive"]:
                there = strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                task = ray.remote(gather).options(num_cpus=0, scheduling_strategy=there)
                name = node["NodeManagerAddress"]
                asked[f"{name} ({node['NodeID'][:6]})"] = task.remote(name)
        for name, answer in asked.items():
            try:
                facts.append(ray.get(answer, timeout=ANSWER_WITHIN_S))
            except ray.exceptions.RayError as error:
                silent[name] = _last(error)
    finally:
        ray.shutdown()
    return Survey(facts=facts, silent=silent, start_s=start_s, end_s=time.time())


def check_nodes(survey: Survey, own: NodeFacts) -> Iterator[Finding]:
    """Compare the nodes with this machine, and each with what it needs."""
    for name, reason in survey.silent.items():
        advice = "the same image, or the same lock file, on every node"
        yield problem(f"node {name}", f"cannot run our code: {reason}", advice)
    for facts in survey.facts:
        found = list(_check_node(facts, own, survey))
        yield from found
        if not found:
            yield ok(f"node {facts.node}", f"{facts.num_cores} cores, the same versions")


def _check_node(facts: NodeFacts, own: NodeFacts, survey: Survey) -> Iterator[Finding]:
    name = f"node {facts.node}"
    skew = [
        f"{package} {version or 'missing'} (here {own.versions[package] or 'missing'})"
        for package, version in facts.versions.items()
        if version.partition("+")[0] != own.versions[package].partition("+")[0]
    ]
    if skew:
        yield problem(name, ", ".join(skew), "the same image, or the same lock file, on every node")
    off_s = facts.clock_off_s(survey.start_s, survey.end_s)
    if off_s > CLOCKS_WITHIN_S:
        yield warning(name, f"its clock is {off_s:.0f} s off", "run chrony on every node")
    if facts.num_files < MIN_FILES:
        text = f"at most {facts.num_files} open files"
        yield problem(name, text, f"ulimit -n {GOOD_FILES}, before Ray starts there")
    if facts.shm_free_bytes < SHM_NEEDED:
        text = f"/dev/shm has {facts.shm_free_bytes / 1024**2:.0f} MiB free"
        yield warning(name, text, "mount a larger one")


def _last(error: BaseException) -> str:
    """The line of a remote traceback that says what it was."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
