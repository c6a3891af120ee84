"""Where a running cluster listens, in words."""

import json
import os
from pathlib import Path
from typing import Any

from cluster.config import ClusterConfig
from cluster.model_source import has_chat_template


def table(config: ClusterConfig, dashboard: str, run_directory: Path) -> dict[str, str]:
    """Name -> address of everything a person may want to open."""
    host = _reachable_host(config)
    http = _http_url(config)
    rows = {
        "HTTP": f"{http}/v1",
        "gRPC": f"{host}:{config.ingress.grpc_port}",
        "Dashboard": f"{http}/dashboard  (relevo top --url {http})",
        "API docs": f"{http}/docs",
        "Status": f"{http}/v1/status  (relevo status --url {http})",
        "Metrics": f"{http}/metrics",
    }
    if dashboard:
        token = os.environ.get("RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token")
        hint = f"  (token: {token})" if os.environ.get("RAY_AUTH_MODE") == "token" else ""
        rows["Ray dashboard"] = f"http://{dashboard}{hint}"
    if config.is_local:
        rows["Logs"] = str(run_directory / "ray" / "session_latest" / "logs")
    return rows


def _http_url(config: ClusterConfig) -> str:
    scheme = "http" if config.ingress.tls is None else "https"
    return f"{scheme}://{_reachable_host(config)}:{config.ingress.http_port}"


def _reachable_host(config: ClusterConfig) -> str:
    host = config.cluster.bind_host
    if host in {"0.0.0.0", "::"}:
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def curl(config: ClusterConfig) -> str:
    """A first request to paste."""
    fields: dict[str, Any]
    if has_chat_template(config.model.path):
        question = {"role": "user", "content": "What is the capital of France?"}
        path, fields = "/v1/chat/completions", {"messages": [question]}
    else:
        path, fields = "/v1/completions", {"prompt": "The capital of France is"}
    body = json.dumps({"model": config.model.name, **fields, "temperature": 0})
    key = " -H 'Authorization: Bearer YOUR_KEY'" if config.ingress.api_keys_file else ""
    tls = config.ingress.tls
    ca = f" --cacert {tls.certificate_file}" if tls is not None else ""
    return (
        f"curl{ca} {_http_url(config)}{path} -H 'Content-Type: application/json'{key} -d '{body}'"
    )
