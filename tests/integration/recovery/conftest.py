"""Two prefill and two decode workers behind gates, in front of them an ingress."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from faults import plan
from faults.plan import Fault, FaultPlan
from tests.gated_cluster import GatedCluster, gated_cluster
from tests.tiny_model import make_tiny_model

ENGINE = {"num_kv_blocks": 256, "max_num_seqs": 32, "max_num_batched_tokens": 64}


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
async def cluster(tmp_path: Path, model_path: Path) -> AsyncIterator[GatedCluster]:
    async with gated_cluster(
        tmp_path, model_path, num_prefill=2, num_decode=2, engine=ENGINE
    ) as opened:
        yield opened


Inject = Callable[..., None]


@pytest.fixture
def inject(monkeypatch: pytest.MonkeyPatch) -> Inject:
    """Give this process, all workers included, these faults from now on."""

    def set_plan(*faults: dict[str, Any]) -> None:
        made = [Fault(**{"match": {}, **fault}) for fault in faults]
        monkeypatch.setattr(plan, "_PLAN", FaultPlan(made, None))

    return set_plan
