"""What `relevo serve` tells of workers that start."""

from pathlib import Path

from cluster.worker_logs import WorkerLogs

HEAD = "2026-11-30 03:49:37,815 INFO 7"


def test_each_whole_line_of_a_worker_s_engine_is_told_once(tmp_path: Path) -> None:
    told: list[tuple[str, str]] = []
    logs = WorkerLogs(tmp_path, lambda phase, text: told.append((phase, text)))
    worker, other = tmp_path / "worker-a-01-7.err", tmp_path / "worker-b-01-8.err"
    logs.update()
    worker.write_text(
        f":actor_name:decode-1\n{HEAD} engine.load_progress [-] loading m: 10 % (1 of 10)\n"
        f"{HEAD} engine.engine [-] mem"
    )
    other.write_text(f":actor_name:ingress-0\n{HEAD} engine.engine [-] not a worker\n")
    logs.update()
    logs.update()
    with worker.open("ab") as file:
        file.write(
            f"ory: \xff lots\n{HEAD} relevo.requests [-] not of the engine\n".encode("latin-1")
        )
    logs.update()
    assert told == [
        ("decode-1", "pid 7: loading m: 10 % (1 of 10)"),
        ("decode-1", "pid 7: memory: \ufffd lots"),
    ]
