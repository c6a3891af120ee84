"""What a reader would paste: the commands and programs in fenced blocks of a page."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.served_cluster import RELEVO, ServedCluster

ROOT = Path(__file__).resolve().parents[1]
_BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# These start or change clusters, or need what no test has.
ELSEWHERE = (
    *("make ", "docker ", "kubectl ", ".venv/bin/relevo serve"),
    "RAY_AUTH_MODE=token .venv/bin/serve deploy",
    *("grpcurl ", ".venv/bin/relevo bench", ".venv/bin/relevo batch", ".venv/bin/relevo sim"),
    *(".venv/bin/relevo deploy", ".venv/bin/relevo rollback", ".venv/bin/relevo plan"),
)


def programs(page: str) -> Iterator[list[str]]:
    """Command lines for all that a page tells a reader to run against a cluster that serves."""
    for language, text in _BLOCK.findall((ROOT / page).read_text()):
        if language == "python":
            yield [sys.executable, "-c", text]
            continue
        for line in text.replace("\\\n", " ").splitlines():
            if line.strip() and not line.startswith(ELSEWHERE):
                yield ["bash", "-euo", "pipefail", "-c", line]


def for_cluster(program: list[str], cluster: ServedCluster) -> list[str]:
    """The same for this cluster: its ports, its model."""
    *start, text = program
    for written, real in (
        ("http://127.0.0.1:8000", cluster.url),
        ("smollm2-135m-instruct", "tiny"),
        (".venv/bin/relevo", str(RELEVO)),
        ("curl ", "curl -sSf "),
    ):
        text = text.replace(written, real)
    return [*start, text]
