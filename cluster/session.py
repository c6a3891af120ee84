"""One run of the application on Ray: connect, deploy, wait until it serves, watch, stop.

Everything here needs Ray; what can fail without it was checked before (`cluster/preflight.py`).
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import ray
from ray import serve
from ray.exceptions import AuthenticationError, RayError
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, DeploymentStatusOverview
from ray.util import list_named_actors

from cluster import rooms
from cluster.app import build, ray_nodes
from cluster.config import ClusterConfig
from cluster.placement import unplaceable
from cluster.placement_plan import plan_placement
from cluster.progress import WorkerWatch
from cluster.releases import digest_of
from cluster.start_error import StartError
from cluster.worker_logs import WorkerLogs
from telemetry import grafana

APPLICATION = "relevo"
INGRESS = "Ingress"
OBJECT_STORE_BYTES = 128 * 1024 * 1024  # nothing of ours passes through the object store
RAY_DIRECTORY = "ray"
GRAFANA_DIRECTORY = "metrics/grafana/dashboards"  # in the folder of a session of Ray
POLL_S = 0.2
REPORT_AGAIN_S = 15.0  # what is waited for is named again after so long
STATUS_WITHIN_S = 2.0

_log = logging.getLogger(__name__)


class Session:
    """Owns the connection to Ray and our application on it. Used from one thread."""

    def __init__(
        self,
        config: ClusterConfig,
        *,
        run_directory: Path,
        say: Callable[[str, str], None],
        replaces: bool = False,  # what of ours runs there already
        waits_for_nodes: bool = True,  # where what runs would have to make room first
        salt: str = "",  # another one than before replaces all of it, changed or not
    ) -> None:
        self.config = config
        self.dashboard = ""
        self._run_directory = run_directory
        self._say = say
        self._replaces = replaces
        self._salt = salt
        self._waits_for_nodes = waits_for_nodes
        self._watch = WorkerWatch(say)
        self._logs = WorkerLogs(run_directory / RAY_DIRECTORY / "session_latest" / "logs", say)
        self._had_serve = self._has_ours = False
        self._has_deployed = False
        self._ray_processes: list[psutil.Process] = []

    @property
    def has_deployed(self) -> bool:
        """Whether there is an application to take back."""
        return self._has_deployed

    def connect(self) -> None:
        """Start our own Ray, or join the one that the configuration names."""
        self.dashboard = (self._start_local() if self.config.is_local else self._join()) or ""
        total = ray.cluster_resources()  # type: ignore[no-untyped-call]
        cpus, gpus = total.get("CPU", 0), total.get("GPU", 0)
        where = "started" if self.config.is_local else f"joined {self.config.cluster.ray_address}"
        self._say("ray", f"{where}: {len(_alive_nodes())} node(s), {cpus:g} CPU, {gpus:g} GPU")

    def _start_local(self) -> str:
        self._say("ray", "starting")
        try:
            context = ray.init(
                address="local",
                dashboard_host="127.0.0.1",
                include_dashboard=True,
                object_store_memory=OBJECT_STORE_BYTES,
                log_to_driver=False,
                logging_level=logging.ERROR,
                # Ray opens its directory to everybody: the secrets lie one above, in ours.
                _temp_dir=str(self._run_directory / RAY_DIRECTORY),
            )
        except Exception as error:  # Ray raises the plain class when its node is not up in time
            reason = str(error).strip().partition("\n")[0]
            raise StartError(f"Ray did not start (is this machine busy?): {reason}") from error
        self._ray_processes = [
            process
            for process in psutil.Process().children()
            if process.name() in {"raylet", "gcs_server"}
        ]
        return str(context.dashboard_url or "")

    def _join(self) -> str:
        address = self.config.cluster.ray_address
        try:
            context = ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, AuthenticationError, RuntimeError, ValueError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise StartError(f"cannot join the Ray cluster at {address}: {reason}") from error
        self._had_serve = any(
            actor["namespace"] == "serve" for actor in list_named_actors(all_namespaces=True)
        )
        self._has_ours = self._had_serve and APPLICATION in serve.status().applications
        if self._has_ours and not self._replaces:
            raise StartError(
                f"an application {APPLICATION!r} runs on this cluster already:"
                f" end it with `serve delete {APPLICATION}`, or replace it with `relevo deploy`"
            )
        return str(context.dashboard_url or "")

    def check_placement(self) -> None:
        """End a local start that can never be placed; on a cluster only say what is missing."""
        nodes = _alive_nodes()
        missing = unplaceable(
            rooms.demands(self.config),
            [node["Resources"] for node in nodes],
            labels=[node["Labels"] for node in nodes],
        )
        if missing and self.config.is_local:
            raise StartError(f"this machine cannot hold every replica: {'; '.join(missing)}")
        if missing and not self._waits_for_nodes and self._has_ours:
            raise StartError(
                f"the nodes cannot hold every replica: {'; '.join(missing)}; what runs there goes"
                " on (--wait-for-nodes: others will come)"
            )
        for line in missing:
            self._say("placement", f"{line}; waiting for it")
        pools = rooms.pool_needs(self.config)
        plan = plan_placement(ray_nodes(), pools, reach=self.config.kv_transfer.reach)
        for line in plan.reasons:
            self._say("placement", line)

    def deploy(self) -> None:
        """Hand the application to Serve, without waiting for it."""
        application = build(self.config.model_dump(mode="json"), salt=self._salt)
        serve.start(proxy_location="Disabled")
        self._has_deployed = True
        serve.run_many(
            [serve.RunTarget(target=application, name=APPLICATION, route_prefix=None)],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )
        prefill, decode = self.config.prefill.replicas, self.config.decode.replicas
        ingresses = self.config.ingress.replicas
        front = "an ingress" if ingresses == 1 else f"{ingresses} ingresses"
        self._say("serve", f"deploying {front}, {prefill} prefill and {decode} decode worker(s)")

    def wait_until_ready(self) -> None:
        """Show how the replicas come up until all of them serve; StartError when they cannot."""
        last_message, reported_at_s = "", time.monotonic()
        while True:
            self._check_ray()
            self._logs.update()
            overview = serve.status().applications.get(APPLICATION)
            if overview is not None:
                if overview.status is ApplicationStatus.DEPLOY_FAILED:
                    raise StartError(f"the application cannot start: {_failure(overview)}")
                message = _failure(overview)
                if message and message != last_message:
                    self._say("serve", message)
                    last_message = message
                if self._is_ready(overview):
                    self._logs.update()
                    return
            if time.monotonic() - reported_at_s > REPORT_AGAIN_S:
                reported_at_s = time.monotonic()
                self._report_waiting(overview)
            time.sleep(POLL_S)

    def _is_ready(self, overview: ApplicationStatusOverview) -> bool:
        if self._replaces and overview.status is not ApplicationStatus.RUNNING:
            return False  # replicas of the release before still answer
        ingress = overview.deployments.get(INGRESS)
        if ingress is None or not _replica_counts(ingress).get("RUNNING"):
            return False
        status = self._status()
        if status is None:
            return False
        self._watch.update(status)
        if self._replaces and status["config"] != digest_of(self.config):
            raise StartError(f"another deployment came meanwhile: {status['config']} serves")
        expected = self.config.prefill.replicas + self.config.decode.replicas
        num_ready = sum(worker["state"] == "ready" for worker in status["workers"])
        return num_ready >= expected and status["state"] in {"ready", "degraded"}

    def _status(self) -> dict[str, Any] | None:
        try:
            answer = serve.get_app_handle(APPLICATION).status.remote()
            status: dict[str, Any] = answer.result(timeout_s=STATUS_WITHIN_S)
        except (TimeoutError, RayError, RayServeException) as error:
            _log.debug("no status: %r", error)
            return None
        return status

    def _report_waiting(self, overview: ApplicationStatusOverview | None) -> None:
        self.check_placement()
        for name, deployment in overview.deployments.items() if overview else ():
            counts = _replica_counts(deployment)
            if set(counts) != {"RUNNING"}:
                states = ", ".join(f"{count} {state.lower()}" for state, count in counts.items())
                self._say("waiting", f"{name}: {states or 'no replica yet'}")

    def add_dashboards(self) -> None:
        """Put our Grafana dashboards beside Ray's own, where a Grafana with its files looks.

        Only now: Ray makes that folder anew while it starts.
        """
        if self.config.is_local:
            session = self._run_directory / RAY_DIRECTORY / "session_latest"
            grafana.write(session / GRAFANA_DIRECTORY, prefix=grafana.RAY_PREFIX)

    def follow(self) -> None:
        """Say what changes, from now on; StartError when Ray itself has ended."""
        while True:
            self._check_ray()
            status = self._status()
            if status is not None:
                self._watch.update(status)
            time.sleep(1.0)

    def _check_ray(self) -> None:
        for process in self._ray_processes:
            try:
                is_alive = process.status() != psutil.STATUS_ZOMBIE
            except psutil.NoSuchProcess:
                is_alive = False
            if not is_alive:
                raise StartError("Ray has ended: one of its two system processes is gone")

    def stop(self, *, is_drained: bool) -> None:
        """Drain and end the application, then leave the cluster, or end it where it is ours."""
        if self._has_deployed and is_drained:
            serve.delete(APPLICATION)
            is_serve_ours = not self.config.is_local and not self._had_serve
            if is_serve_ours and not serve.status().applications:
                serve.shutdown()  # type: ignore[no-untyped-call]
        ray.shutdown()

    def leave(self) -> None:
        """Let the application run on."""
        ray.shutdown()


def _replica_counts(deployment: DeploymentStatusOverview) -> dict[str, int]:
    return {
        str(getattr(state, "value", state)): count
        for state, count in deployment.replica_states.items()
    }


def _alive_nodes() -> list[dict[str, Any]]:
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return [node for node in nodes if node["Alive"]]


def _failure(overview: ApplicationStatusOverview) -> str:
    """The line of the first deployment's message that says what went wrong."""
    for name, deployment in overview.deployments.items():
        lines = [line.strip() for line in deployment.message.splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line.partition(":")[0]]
        if errors:
            return f"{name}: {errors[-1]}"
    if overview.status is ApplicationStatus.DEPLOY_FAILED:
        return " ".join(overview.message.split())[-500:]
    return ""
