"""Speed of the router: one decision, state events, memory of the index.

    .venv/bin/python -m bench.router [--workers 64 1000] [--blocks 1000000] [--rounds 200]

Decisions are for prompts of 8,192 tokens with block size 32. A quarter of the workers hold the
first half; half of the workers prefill, each decode worker has 16 links. A decision hashes the
prompt, asks both indexes and picks ("all"); counting the pick and predicting its blocks follows.
The state events are parsed from the bytes of a stream, 256 blocks a message. All times are CPU of
one thread, so that neighbours on the machine count less; memory is what a fresh process grows by.
Beside each median stands the best, and first of all what this machine takes for a few plain things,
since its speed changes with its neighbours.
"""

import argparse
import gc
import hashlib
import multiprocessing
import os
import random
import statistics
import time
from array import array
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import psutil
from relevo.v1 import common_pb2, state_pb2

from engine.block_hash import BlockHash, hash_root, joined_hashes, pack_tokens
from engine.native.hash_chain import DIGEST_BYTES
from router.block_name import BlockScheme, names_of_joined
from router.chooser import Chooser
from router.fleet import Fleet
from router.joint_scorer import JointCostScorer
from router.policy import CheapestPicker, FilteredPolicy
from router.prefix_index import PrefixIndex
from router.prompt import Prompt
from router.worker_state import WorkerState
from router.worker_view import DECODE, PREFILL, WorkerKey
from rpc.description import WorkerDescription

BLOCK_SIZE = 32
NUM_TOKENS = 8192
NUM_LINKS = 16
MESSAGE_BLOCKS = 256
ROOT = hash_root(
    model_id="bench", model_revision="", dtype="bfloat16", block_size=BLOCK_SIZE, layout_version=1
)
SCHEME = BlockScheme(BLOCK_SIZE, ROOT)
Message = state_pb2.WatchStateResponse


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[64, 1000])
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=200)
    arguments = parser.parse_args()
    _print_yardsticks()
    for num_workers in arguments.workers:
        _print_decisions(num_workers, arguments.rounds)
    # Each in a process of its own: what one index leaves behind is not the other's.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as processes:
        for line in processes.map(_measure_memory, (arguments.blocks,) * 2, (1, 2)):
            print(line)
    _print_events(min(arguments.blocks, 500_000))


def _print_yardsticks() -> None:
    """What no router could go below, and how fast this machine is just now."""
    token_ids = _tokens(random.Random(1), NUM_TOKENS)
    packed = pack_tokens(token_ids)
    block = bytes(32 + 4 * BLOCK_SIZE)  # a parent's digest and a block's tokens
    column = np.zeros(NUM_LINKS * 32)
    things: dict[str, Callable[[], object]] = {
        "256 sha256 digests of a block": lambda: [
            hashlib.sha256(block).digest() for _ in range(256)
        ],
        "8,192 tokens to bytes": lambda: pack_tokens(token_ids),
        "256 digests in a chain": lambda: joined_hashes(packed, block_size=BLOCK_SIZE, parent=ROOT),
        "100 numpy operations on 512 numbers": lambda: [np.maximum(column, 1) for _ in range(100)],
    }
    for name, do in things.items():
        times_s = []
        for _ in range(100):
            start_s = time.thread_time()
            do()
            times_s.append(time.thread_time() - start_s)
        print(f"{name}: {statistics.median(times_s) * 1e6:.0f} ({min(times_s) * 1e6:.0f}) µs")


def _print_decisions(num_workers: int, num_rounds: int) -> None:
    rng = random.Random(1)
    fleet = make_fleet(num_workers, rng)
    policy = FilteredPolicy(
        local_prefill="auto", scorer=JointCostScorer(), picker=CheapestPicker(rng)
    )
    chooser = Chooser(fleet, policy, rng=rng, now=time.monotonic)
    prefix = _tokens(rng, NUM_TOKENS // 2)
    names = _prompt(prefix).block_names(SCHEME)
    for key in list(fleet.states)[::4]:
        fleet.indexes[key.worker_id.partition("-")[0]].store(key, names)
    parts: dict[str, list[float]] = {"all": [], "hash": [], "decide": [], "count": []}
    ends = [array("I", _tokens(rng, NUM_TOKENS // 2)) for _ in range(num_rounds)]
    for end in ends:
        # New objects, made right before in one go, as a tokenizer does.
        _time_decision(fleet, chooser, _prompt([*prefix, *end]), parts)
    text = ", ".join(
        f"{name} {statistics.median(values) * 1e6:.0f} ({min(values) * 1e6:.0f})"
        for name, values in parts.items()
    )
    print(f"decision over {num_workers} workers, median (best) µs: {text}")


def _time_decision(
    fleet: Fleet, chooser: Chooser, prompt: Prompt, parts: dict[str, list[float]]
) -> None:
    start_s = time.thread_time()
    prompt.block_names(SCHEME)
    hashed_s = time.thread_time()
    pick = chooser.pick(prompt)
    picked_s = time.thread_time()
    assert pick is not None
    pick_id = chooser.take(prompt, pick)
    parts["all"].append(picked_s - start_s)
    parts["hash"].append(hashed_s - start_s)
    parts["decide"].append(picked_s - hashed_s)
    parts["count"].append(time.thread_time() - picked_s)
    for worker in pick.decision.chosen.choice.workers:
        fleet.states[worker.key].drop_pick(pick_id)


def _tokens(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(50_000) for _ in range(num_tokens)]


def _prompt(token_ids: list[int]) -> Prompt:
    return Prompt(token_ids, cache_salt="", num_output_tokens=128)


def make_fleet(num_workers: int, rng: random.Random) -> Fleet:
    """Half prefill, half decode, each decode worker with 16 links and some load."""
    fleet = Fleet()
    prefill = [WorkerKey(f"prefill-{number}", 1) for number in range(num_workers // 2)]
    for key in prefill:
        load = state_pb2.WorkerLoad(num_waiting_uncached_tokens=rng.randrange(4000))
        _join(fleet, key, PREFILL, load)
    for number in range(num_workers - len(prefill)):
        num_running = rng.randrange(16)
        load = state_pb2.WorkerLoad(num_running=num_running, request_s=1e-4, kv_token_s=1e-8)
        for peer in rng.sample(prefill, min(NUM_LINKS, len(prefill))):
            load.links.add(
                peer_id=peer.worker_id,
                peer_incarnation=peer.incarnation,
                state="ready",
                bandwidth_bytes_per_s=rng.uniform(8e9, 12e9),
                latency_s=1e-3,
            )
        _join(fleet, WorkerKey(f"decode-{number}", 1), DECODE, load)
    return fleet


def _join(fleet: Fleet, key: WorkerKey, pool: str, load: state_pb2.WorkerLoad) -> WorkerState:
    description = WorkerDescription(
        worker_id=key.worker_id,
        pool=pool,
        incarnation=key.incarnation,
        address=f"127.0.0.1:{len(fleet.states)}",
        node_id="bench",
        pid=1,
    )
    state = fleet.add(description, now_s=0.0)
    hello = Message.Hello(
        worker=common_pb2.WorkerRef(worker_id=key.worker_id, incarnation=key.incarnation),
        layout=common_pb2.KVLayout(block_size=BLOCK_SIZE),
        pool=pool,
        max_num_seqs=64,
        max_model_len=131_072,
        num_kv_blocks=1 << 20,
        hash_root=ROOT,
        max_num_batched_tokens=2048,
        kv_bytes_per_token=131_072,
    )
    load.MergeFrom(
        state_pb2.WorkerLoad(
            state="ready",
            prefill_tokens_per_s=20_000.0,
            step_s=0.02,
            blocks=state_pb2.BlockCounts(free=10_000, used=1000, total=11_000),
        )
    )
    state.apply(Message(hello=hello, sequence=0), now_s=0.0)
    state.apply(Message(snapshot_chunk=Message.SnapshotChunk(last=True), sequence=1), now_s=0.0)
    state.apply(Message(load=load, sequence=2), now_s=0.0)
    return state


def _measure_memory(num_blocks: int, num_replicas: int) -> str:
    num_workers = 1000
    index = PrefixIndex()
    keys = [WorkerKey(f"prefill-{number}", 1) for number in range(num_workers)]
    for key in keys:
        index.add_worker(key, limit=num_blocks, scheme=SCHEME)
    rng, process, slowest_s = random.Random(1), psutil.Process(), 0.0
    gc.collect()
    before = process.memory_info().rss
    start_s = time.thread_time()
    for _ in range(num_blocks // MESSAGE_BLOCKS):
        names = names_of_joined(rng.randbytes(MESSAGE_BLOCKS * DIGEST_BYTES))
        store_s = time.thread_time()
        for key in rng.sample(keys, num_replicas):
            index.store(key, names)
        slowest_s = max(slowest_s, time.thread_time() - store_s)
    num_bytes = (process.memory_info().rss - before) / index.num_blocks
    rate = index.num_entries() / (time.thread_time() - start_s)
    start_s = time.thread_time()
    index.scrub(keys[0])
    scrub_s = time.thread_time() - start_s
    return (
        f"index of {index.num_blocks:,} blocks, {num_replicas} worker(s) each: "
        f"{num_bytes:.0f} bytes per block, {rate:,.0f} stored/s, slowest message "
        f"{slowest_s * 1e3:.0f} ms, a worker lost in {scrub_s * 1e3:.1f} ms"
    )


def _print_events(num_blocks: int) -> None:
    fleet = Fleet()
    states = [
        _join(fleet, WorkerKey(f"decode-{number}", 1), DECODE, state_pb2.WorkerLoad())
        for number in range(64)
    ]
    raw: list[bytes] = []
    removed: list[BlockHash] = []
    for number in range(num_blocks // (2 * MESSAGE_BLOCKS)):
        stored = [BlockHash(os.urandom(32)) for _ in range(MESSAGE_BLOCKS)]
        events = Message.BlockEvents(stored=stored, removed=removed if number % 64 else ())
        sequence = 3 + number // 64
        raw.append(Message(block_events=events, sequence=sequence).SerializeToString())
        removed = stored
    start_s = time.thread_time()
    num_changes = 0
    for number, data in enumerate(raw):
        message = Message.FromString(data)
        states[number % 64].apply(message, now_s=0.0)
        num_changes += len(message.block_events.stored) + len(message.block_events.removed)
    rate = num_changes / (time.thread_time() - start_s)
    print(f"state events, from bytes to index: {rate:,.0f} blocks/s")


if __name__ == "__main__":
    main()
