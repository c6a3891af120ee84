"""An answer depends on its request and on nothing else."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.properties.client import own_salt
from tests.properties.conftest import Cluster
from tests.properties.requests import bodies

Body = dict[str, Any]


def joined(events: list[Body]) -> list[Body]:
    """The choices of a stream put together again, in the shape of a whole answer."""
    choices: dict[int, Body] = {}
    for choice in (each for event in events for each in event["choices"]):
        whole = choices.setdefault(choice["index"], {**choice, "text": "", "logprobs": None})
        whole["text"] += choice["text"]
        whole["finish_reason"] = choice["finish_reason"]
        if "stop_reason" in choice:  # told with the end
            whole["stop_reason"] = choice["stop_reason"]
        for name, values in (choice["logprobs"] or {}).items():
            whole["logprobs"] = whole["logprobs"] or {}
            whole["logprobs"][name] = whole["logprobs"].get(name, []) + values
    return [choices[index] for index in sorted(choices)]


@settings(max_examples=12, deadline=None)
@given(body=bodies())
def test_a_stream_says_what_the_whole_answer_says(cluster: Cluster, body: Body) -> None:
    whole = cluster.handed_over.complete(body)
    events = cluster.handed_over.stream(body)
    assert joined(events) == whole.choices
    usage = events[-1]["usage"]
    assert {name: usage[name] for name in whole.usage} == whole.usage
    assert all(event["usage"] is None for event in events[:-1])


@settings(max_examples=4, deadline=None)
@given(batch=st.lists(bodies(), min_size=3, max_size=5))
def test_neighbours_change_nothing(cluster: Cluster, batch: list[Body]) -> None:
    for client in cluster.both:
        together = client.complete_all(batch)
        assert together == [client.complete(body) for body in batch]


@settings(max_examples=8, deadline=None)
@given(body=bodies())
def test_the_cache_changes_nothing(cluster: Cluster, body: Body) -> None:
    body["cache_salt"] = own_salt()
    for client in cluster.both:
        cold, warm, warmer = (client.complete(body) for _ in range(3))
        assert cold == warm == warmer


@settings(max_examples=12, deadline=None)
@given(body=bodies())
def test_it_is_the_same_handed_over_or_not(cluster: Cluster, body: Body) -> None:
    handed_over, alone = (
        client.complete({**body, "cache_salt": own_salt()}) for client in cluster.both
    )
    assert handed_over == alone


@settings(max_examples=10, deadline=None)
@given(body=bodies())
def test_each_choice_ends_once_and_then_the_stream(cluster: Cluster, body: Body) -> None:
    for client in cluster.both:
        events = client.stream(body)
        finished = [
            choice["index"]
            for event in events
            for choice in event["choices"]
            if choice["finish_reason"] is not None
        ]
        assert sorted(finished) == list(range(body.get("n", 1)))
        assert not any("error" in event for event in events)


@settings(max_examples=5, deadline=None)
@given(batch=st.lists(bodies(), min_size=2, max_size=5), data=st.data())
def test_every_block_comes_back(cluster: Cluster, batch: list[Body], data: st.DataObject) -> None:
    patience_s = data.draw(st.lists(st.floats(0.001, 0.1), min_size=2, max_size=2))
    for client in cluster.both:
        with ThreadPoolExecutor(len(batch)) as threads:
            running = [threads.submit(client.complete, body) for body in batch]
            for each_s in patience_s:
                client.leave(batch[0], after_s=each_s)
            for each in running:
                each.result()
        client.wait_until_quiet()
