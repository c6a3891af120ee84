"""One of several ingresses on the same ports, over a scripted router, in a process of its own.

python -m tests.ingress_process FOLDER SETTINGS     the tokenizer's folder; IngressConfig as JSON
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from api.config import IngressConfig, ModelConfig
from api.ingress import Ingress
from router.request import FinishReason, TokenBatch
from telemetry.prometheus_sink import PrometheusSink
from tests.fake_router import FakeRouter
from tests.tiny_tokenizer import EOS_TOKEN_ID, byte_level_backend

ANSWER = "Hello wörld 🦊"
ROOT = Path(__file__).resolve().parents[1]
STEP_S = 0.005
UP = "up"


class IngressProcess:
    """The other side: starts one, waits for it, ends it."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        command = [sys.executable, "-m", "tests.ingress_process", str(folder), json.dumps(settings)]
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid

    def wait_until_up(self) -> None:
        """It listens."""
        assert self._process.stdout is not None
        assert self._process.stdout.readline().strip() == UP

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Ask it to end."""
        self._process.send_signal(number)

    def wait(self, timeout_s: float = 60.0) -> int:
        """Its exit status."""
        return self._process.wait(timeout_s)


async def _run(folder: Path, settings: Mapping[str, Any]) -> None:
    router = FakeRouter()
    tokens = byte_level_backend().encode(ANSWER, add_special_tokens=False).ids
    steps = [TokenBatch([token]) for token in tokens]
    router.script = lambda _: [*steps, TokenBatch([EOS_TOKEN_ID], FinishReason.STOP)]
    router.step_s = STEP_S
    ingress = Ingress(
        IngressConfig(**settings),
        ModelConfig(model_id="tiny", path=str(folder), revision="main"),
        router=router,
        sink=PrometheusSink(),
    )
    is_over = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, is_over.set)

    def find_siblings() -> Set[int]:
        siblings = folder / "siblings"
        siblings.mkdir(exist_ok=True)
        (siblings / str(os.getpid())).touch()
        return {int(each.name) for each in siblings.iterdir()}

    await ingress.start(find_siblings)
    sys.stdout.write(f"{UP}\n")
    sys.stdout.flush()
    await is_over.wait()
    await ingress.stop()


if __name__ == "__main__":
    asyncio.run(_run(Path(sys.argv[1]), json.loads(sys.argv[2])))
