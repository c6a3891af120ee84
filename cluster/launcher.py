"""`relevo serve`: check, start, show where it listens, and leave nothing behind.

Order: configuration and preflight (seconds, no Ray) -> demo model -> Ray -> placement -> Serve
application -> table of addresses -> wait for SIGINT or SIGTERM -> drain -> verify that all ended.
"""

import contextlib
import importlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from huggingface_hub import snapshot_download
from rich.console import Console

from cluster import addresses, preflight, processes, rooms
from cluster.config import ClusterConfig, load_config
from cluster.config_sources import ConfigError
from cluster.model_source import DEMO_MODEL_PATH, is_checkpoint, is_hub_id
from cluster.progress import Progress
from rpc.token import create_token

EXIT_FAILED = 1
EXIT_REFUSED = 2
STOP_SPARE_S = 25.0  # on top of the drain: Serve's and Ray's own ends
END_GRACE_S = 3.0
SOCKET_DIRECTORY = "/tmp"  # Ray's socket paths must stay under 108 characters


class _StopRequested(BaseException):
    """SIGINT or SIGTERM arrived."""


class _Signals:
    """The first SIGINT or SIGTERM interrupts the main thread, the next one ends the waiting."""

    def __init__(self) -> None:
        self.force = threading.Event()
        self._is_stopping = False

    def install(self) -> None:
        """Take both signals; repeated because Ray installs handlers of its own."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def begin_stop(self) -> None:
        """From now on a signal forces the end instead of interrupting."""
        self._is_stopping = True
        self.install()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if self._is_stopping:
            self.force.set()
            return
        self._is_stopping = True
        raise _StopRequested


def serve(file: Path | None, assignments: Sequence[str]) -> int:
    """Run the cluster until a signal; the exit status."""
    # Bound to the streams of now: both are redirected while Ray runs.
    console, errors = Console(file=sys.stdout), Console(file=sys.stderr)
    progress = Progress(console)
    signals = _Signals()
    signals.install()
    processes.adopt_orphans()
    try:
        config = load_config(file, assignments=assignments)
        preflight.check(config)
        progress.say("config", _summary(config))
        with _run_directory() as run_directory:
            config = _prepare(config, run_directory, progress)
            return _run(config, run_directory, progress, signals)
    except (ConfigError, preflight.PreflightError) as error:
        errors.print(f"relevo serve: {error}", soft_wrap=True, highlight=False, markup=False)
        return EXIT_REFUSED
    except _StopRequested:
        processes.end_descendants(END_GRACE_S)
        return 0


def _summary(config: ClusterConfig) -> str:
    return (
        f"{config.model.name}: {config.prefill.replicas} prefill and"
        f" {config.decode.replicas} decode worker(s); ports and model checked"
    )


@contextlib.contextmanager
def _run_directory() -> Iterator[Path]:
    parent = SOCKET_DIRECTORY if os.access(SOCKET_DIRECTORY, os.W_OK) else None
    directory = Path(tempfile.mkdtemp(prefix="relevo-", dir=parent))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _prepare(config: ClusterConfig, run_directory: Path, progress: Progress) -> ClusterConfig:
    """Make what the workers expect to find: the model on this machine, the token file."""
    model, cluster = config.model, config.cluster
    if Path(model.path) == DEMO_MODEL_PATH and not is_checkpoint(DEMO_MODEL_PATH):
        progress.say("model", "converting the demo model, once (about 40 s)")
        _convert_demo_model()
    elif config.is_local and is_hub_id(model.path):
        progress.say("model", f"fetching {model.path} unless it is cached")
        path = snapshot_download(model.path)
        model = model.model_copy(update={"id": model.name, "path": path})
    if config.is_local:
        token_file = cluster.token_file or str(run_directory / "token")
        create_token(Path(token_file).expanduser())
        cluster = cluster.model_copy(update={"token_file": token_file})
    return rooms.with_absolute_paths(config.model_copy(update={"model": model, "cluster": cluster}))


def _convert_demo_model() -> None:
    # In a process of its own: the launcher itself never needs torch.
    command = [sys.executable, "-m", "cluster.demo_model"]
    environment = {**os.environ, "TQDM_DISABLE": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise preflight.PreflightError(f"the demo model cannot be converted: {reason}")


def _run(config: ClusterConfig, run_directory: Path, progress: Progress, signals: _Signals) -> int:
    """Start, follow and stop a session; what Ray itself prints goes to a file."""
    if config.is_local:
        _prepare_ray_environment(run_directory)
    errors = Console(file=sys.stderr)
    with _quiet(run_directory / "launcher.log"):
        # Only now: Ray reads the environment, and keeps sys.stderr, when it is imported.
        session_module = importlib.import_module("cluster.session")
        session = session_module.Session(config, run_directory=run_directory, say=progress.say)
        status = EXIT_FAILED
        try:
            session.connect()
            signals.install()
            session.check_placement()
            session.deploy()
            session.wait_until_ready()
            rows = addresses.table(config, session.dashboard, run_directory)
            progress.show(rows, footer=addresses.curl(config))
            session.follow()
        except _StopRequested:
            status = 0
        except session_module.SessionError as error:
            errors.print(f"relevo serve: {error}", soft_wrap=True, highlight=False, markup=False)
        except Exception:
            errors.print(traceback.format_exc(), highlight=False, markup=False)
            raise
        finally:
            signals.begin_stop()
            _stop(session, config, progress, signals)
        return status


def _prepare_ray_environment(run_directory: Path) -> None:
    """Our own Ray asks for a token: the person's own, or one that lives as long as this run."""
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    known = "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ
    if known or (Path.home() / ".ray" / "auth_token").is_file():
        return
    path = run_directory / "ray_token"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32))
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(path)


@contextlib.contextmanager
def _quiet(log: Path) -> Iterator[None]:
    with (
        log.open("w", buffering=1) as file,
        contextlib.redirect_stdout(file),
        contextlib.redirect_stderr(file),
    ):
        yield


def _stop(session: Any, config: ClusterConfig, progress: Progress, signals: _Signals) -> None:
    progress.say("stop", "draining; press Ctrl-C again to end at once")
    worker = threading.Thread(target=session.stop, name="stop", daemon=True)
    worker.start()
    drain_s = max(config.prefill.drain_s, config.decode.drain_s)
    deadline = threading.Event()
    timer = threading.Timer(drain_s + STOP_SPARE_S, deadline.set)
    timer.daemon = True
    timer.start()
    while worker.is_alive() and not signals.force.is_set() and not deadline.is_set():
        worker.join(timeout=0.1)
    timer.cancel()
    left = processes.end_descendants(END_GRACE_S) if config.is_local else []
    progress.say("stop", f"processes {left} did not end" if left else "everything has ended")
