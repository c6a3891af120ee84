"""`relevo serve`: check, start, show where it listens, and leave nothing behind.

Order: configuration and preflight (seconds, no Ray) -> demo model -> Ray -> placement -> Serve
application -> table of addresses -> wait for SIGINT or SIGTERM -> drain -> verify that all ended.
"""

import contextlib
import importlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from api.build import this_build
from cluster import addresses, preflight, processes
from cluster.config import ClusterConfig, load_config, non_defaults
from cluster.config_sources import ConfigError
from cluster.preparation import prepare
from cluster.progress import Progress
from cluster.start_error import StartError
from cluster.stop_signals import StopRequested, StopSignals
from cluster.terminal import Terminal, redirected

EXIT_FAILED = 1
EXIT_REFUSED = 2
STOP_SPARE_S = 20.0  # on top of the drain: Serve's and Ray's own ends
END_GRACE_S = 3.0
SOCKET_DIRECTORY = "/tmp"  # Ray's socket paths must stay under 108 characters


def serve(file: Path | None, assignments: Sequence[str]) -> int:
    """Run the cluster until a signal; the exit status."""
    terminal, signals = Terminal(), StopSignals()
    progress = Progress(terminal.out)
    signals.install()
    processes.adopt_orphans()
    try:
        config = load_config(file, assignments=assignments)
        preflight.check(config)
        progress.say("relevo", str(this_build()))
        progress.say("config", _summary(config))
        if changed := non_defaults(config):
            progress.say("settings", changed)
        with _run_directory() as run_directory:
            config = prepare(config, run_directory, progress.say)
            return _Run(config, run_directory, terminal, progress, signals).run()
    except (ConfigError, StartError) as error:
        terminal.fail(f"relevo serve: {error}")
        return EXIT_REFUSED
    except StopRequested:
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


class _Run:
    """One start, life and stop of a session. Invariant: what it started ends with `run`."""

    def __init__(
        self,
        config: ClusterConfig,
        run_directory: Path,
        terminal: Terminal,
        progress: Progress,
        signals: StopSignals,
    ) -> None:
        self._config = config
        self._directory = run_directory
        self._terminal = terminal
        self._progress = progress
        self._signals = signals
        self._session: Any = None
        self._is_ready = False

    def run(self) -> int:
        """Start, follow and stop; the exit status."""
        status = EXIT_FAILED
        with redirected(self._directory / "launcher.log"):
            try:
                self._live()
            except StopRequested:
                status = 0
            except StartError as error:
                self._terminal.fail(f"relevo serve: {error}")
            finally:
                self._signals.begin_stop()
                is_clean = self._stop()
        if not is_clean:
            # Ray's threads still wait for processes that are gone, and would end this one noisily.
            shutil.rmtree(self._directory, ignore_errors=True)
            os._exit(status)
        return status

    def _live(self) -> None:
        # Only now: Ray reads the environment when it is imported.
        module = importlib.import_module("cluster.session")
        session = module.Session(
            self._config, run_directory=self._directory, say=self._progress.say
        )
        self._session = session
        session.connect()
        self._signals.install()
        session.check_placement()
        session.deploy()
        session.wait_until_ready()
        self._is_ready = True
        session.add_dashboards()
        rows = addresses.table(self._config, session.dashboard, self._directory)
        self._progress.show(rows, footer=addresses.curl(self._config))
        session.follow()

    def _stop(self) -> bool:
        """End all of it within a bound; whether Ray ended by itself."""
        if self._session is None:
            self._progress.say("stop", "nothing had been started")
            return True
        drain_s = max(self._config.prefill.drain_s, self._config.decode.drain_s)
        # What never served has nothing to drain; on a foreign cluster it must be taken back.
        is_foreign = not self._config.is_local
        is_drained = self._is_ready or (is_foreign and self._session.has_deployed)
        if is_drained:
            self._progress.say(
                "stop", f"draining, at most {drain_s:g} s; Ctrl-C again ends it at once"
            )
        stopping = threading.Thread(
            target=self._session.stop, kwargs={"is_drained": is_drained}, daemon=True
        )
        stopping.start()
        end_s = time.monotonic() + STOP_SPARE_S + (drain_s if is_drained else 0.0)
        while stopping.is_alive() and time.monotonic() < end_s:
            if self._signals.force.is_set() and self._config.is_local:
                break
            stopping.join(timeout=0.1)
        grace_s = 0.0 if self._signals.force.is_set() else END_GRACE_S
        left = processes.end_descendants(grace_s) if self._config.is_local else []
        text = f"processes {left} did not end" if left else "everything has ended"
        self._progress.say("stop", text)
        return not stopping.is_alive()
