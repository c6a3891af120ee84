"""`relevo deploy` and `relevo rollback`: onto a Ray cluster that runs, in place, and away again.

Configuration and preflight -> kept among the releases -> Ray -> Serve replaces the replicas ->
ready, or named as failed -> a line of history. The application stays when this command ends.
"""

import importlib
import os
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from api.build import this_build
from cluster import preflight
from cluster.config import ClusterConfig, load_config
from cluster.config_sources import ConfigError
from cluster.preparation import prepare
from cluster.progress import Progress
from cluster.releases import Release, Releases, now_text
from cluster.start_error import StartError
from cluster.terminal import Terminal, redirected

EXIT_FAILED = 1
EXIT_REFUSED = 2


class _NotServedError(Exception):
    """What was deployed does not come to serve; a StartError before that has touched nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HowToReplace:
    """What a person may ask for, beyond the configuration."""

    restarts: bool = False  # replicas that would be made the same, too
    waits_for_nodes: bool = False  # though what runs makes room before they are there


def deploy(
    file: Path | None, assignments: Sequence[str], *, history: Path, how: HowToReplace
) -> int:
    """Deploy a configuration; the exit status is 0 once it serves."""
    terminal = Terminal()
    try:
        config = load_config(file, assignments=assignments)
        deployment = _Deployment(config, Releases(history), terminal, is_rollback=False)
        return deployment.run(how)
    except (ConfigError, StartError) as error:
        terminal.fail(f"relevo deploy: {error}")
        return EXIT_REFUSED


def rollback(digest: str, *, ray_address: str, history: Path) -> int:
    """Deploy the release before the present one, or the one that is named."""
    terminal, releases = Terminal(), Releases(history)
    try:
        config = releases.load(digest or releases.previous(ray_address))
        deployment = _Deployment(config, releases, terminal, is_rollback=True)
        deployment.compare_build(releases.history(ray_address))
        return deployment.run(HowToReplace(waits_for_nodes=True))
    except (ConfigError, StartError) as error:
        terminal.fail(f"relevo rollback: {error}")
        return EXIT_REFUSED


def show_history(*, ray_address: str, history: Path) -> int:
    """List what was deployed, the latest last."""
    table = Table("at", "release", "build", "version", "how", "served", box=None)
    for each in Releases(history).history(ray_address):
        how = "rollback" if each.is_rollback else "deploy"
        served = "yes" if each.is_ready else "no"
        table.add_row(each.at, each.digest, each.build, each.version, how, served)
    Console(width=120).print(table)
    return 0


class _Deployment:
    """One change of what runs. Invariant: what is tried stands in the history, with its outcome."""

    def __init__(
        self, config: ClusterConfig, releases: Releases, terminal: Terminal, *, is_rollback: bool
    ) -> None:
        if config.is_local:
            raise ConfigError(
                "cluster.ray_address is local: a cluster of one's own ends with `relevo serve`, "
                "name the one to deploy to as host:port or auto"
            )
        preflight.check(config)
        self._config = config
        self._releases = releases
        self._terminal = terminal
        self._progress = Progress(terminal.out)
        self._is_rollback = is_rollback

    def compare_build(self, history: Sequence[Release]) -> None:
        """Say where code and configuration do not go back together."""
        digest = self._releases.keep(self._config)
        builds = {each.build for each in history if each.digest == digest and each.is_ready}
        if builds and this_build().digest not in builds:
            self._progress.say(
                "release",
                f"{digest} was served by build {', '.join(sorted(builds))}, this is build "
                f"{this_build().digest}: the configuration goes back, the code does not",
            )

    def run(self, how: HowToReplace) -> int:
        """Deploy, wait, note the outcome; the exit status."""
        say = self._progress.say
        with tempfile.TemporaryDirectory(prefix="relevo-") as folder:
            directory = Path(folder)
            config = prepare(self._config, directory, say)
            digest = self._releases.keep(config)
            say("release", f"{digest}, {this_build()}")
            reason = ""
            with redirected(directory / "deploy.log"):
                try:
                    _replace(config, directory, say, how)
                except _NotServedError as error:
                    reason = str(error)
            self._note(config, digest, is_ready=not reason)
        if reason:
            verb = "rollback" if self._is_rollback else "deploy"
            self._terminal.fail(f"relevo {verb}: {reason}; `relevo rollback` goes back")
            return EXIT_FAILED
        say("release", f"{digest} serves; /version names it")
        return 0

    def _note(self, config: ClusterConfig, digest: str, *, is_ready: bool) -> None:
        build = this_build()
        self._releases.note(
            Release(
                at=now_text(),
                digest=digest,
                build=build.digest,
                version=build.version,
                ray_address=config.cluster.ray_address,
                is_rollback=self._is_rollback,
                is_ready=is_ready,
            )
        )


def _replace(config: ClusterConfig, directory: Path, say: Any, how: HowToReplace) -> None:
    # Only now: Ray reads the environment when it is imported.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    module = importlib.import_module("cluster.session")
    session = module.Session(
        config,
        run_directory=directory,
        say=say,
        replaces=True,
        salt=uuid.uuid4().hex if how.restarts else "",
        waits_for_nodes=how.waits_for_nodes,
    )
    try:
        session.connect()
        session.check_placement()
        session.deploy()
        try:
            session.wait_until_ready()
        except StartError as error:
            raise _NotServedError(str(error)) from error
    finally:
        session.leave()
