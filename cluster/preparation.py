"""What is made on this machine before Ray starts: the model, the secrets of one run."""

import os
import secrets
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from cluster import rooms
from cluster.config import ClusterConfig
from cluster.model_source import demo_at, fetch_hub_model, is_checkpoint, is_hub_id
from cluster.start_error import StartError
from rpc.token import create_token

CONVERSION_WITHIN_S = 600


def prepare(
    config: ClusterConfig, run_directory: Path, say: Callable[[str, str], None]
) -> ClusterConfig:
    """Make what the workers expect to find, and return where they find it."""
    model, cluster = config.model, config.cluster
    if (demo := demo_at(model.path)) and not is_checkpoint(demo.path):
        say("model", f"converting {demo.name}, once (about 40 s)")
        _convert_demo_model(demo.name)
    elif config.is_local and is_hub_id(model.path):
        say("model", f"fetching {model.path} unless it is cached")
        path = fetch_hub_model(model.path)
        model = model.model_copy(update={"id": model.name, "path": path})
    if config.is_local:
        token_file = cluster.token_file or str(run_directory / "token")
        create_token(Path(token_file).expanduser())
        cluster = cluster.model_copy(update={"token_file": token_file})
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Ray's own is 15, what others on this machine leave over: ours have people waiting.
        os.environ.setdefault("RAY_worker_niceness", "0")
        _prepare_ray_token(run_directory)
    return rooms.with_absolute_paths(config.model_copy(update={"model": model, "cluster": cluster}))


def _convert_demo_model(name: str) -> None:
    # In a process of its own: the launcher itself never needs torch.
    command = [sys.executable, "-m", "cluster.demo_model", name]
    environment = {**os.environ, "TQDM_DISABLE": "1"}
    done = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=CONVERSION_WITHIN_S,
    )
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise StartError(f"{name} cannot be converted: {reason}")


def _prepare_ray_token(run_directory: Path) -> None:
    """Our own Ray asks for a token: the person's own, or one that lives as long as this run."""
    os.environ["RAY_AUTH_MODE"] = "token"
    is_known = "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ
    if is_known or (Path.home() / ".ray" / "auth_token").is_file():
        return
    # Left to itself Ray makes one in the home directory that others can read.
    path = run_directory / "ray_token"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32))
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(path)
