"""Structured output of the demo model over HTTP, as the official client asks for it."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal

import httpx
import openai
import pytest
from pydantic import BaseModel, Field

from api.ingress import Ingress
from router.config import RouterConfig
from tests.cluster_processes import ClusterProcesses
from tests.integration.api.test_whole_path import until_ready
from tests.relay import ingress_over

DEMO_MODEL = Path(".models/smollm2-135m-instruct").resolve()
ENGINE = {"dtype": "auto", "block_size": 32, "max_num_batched_tokens": 256}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not DEMO_MODEL.is_dir(), reason="needs the demo model"),
]


class Person(BaseModel):
    """What the model shall say."""

    name: str = Field(max_length=16)
    age: int = Field(ge=0, le=120)
    drinks: list[Literal["tea", "coffee", "water"]] = Field(min_length=1, max_length=2)


@pytest.fixture
async def ingress(tmp_path: Path) -> AsyncIterator[Ingress]:
    cluster = ClusterProcesses(tmp_path, DEMO_MODEL, engine=ENGINE)
    try:
        descriptions = await asyncio.to_thread(cluster.ensure, prefill=0, decode=1)
        async with ingress_over(cluster, descriptions, RouterConfig()) as ingress:
            yield ingress
    finally:
        await asyncio.to_thread(cluster.stop_all)


async def test_the_demo_model_answers_in_the_form_that_was_asked_for(ingress: Ingress) -> None:
    url = f"http://127.0.0.1:{ingress.http_port}"
    async with httpx.AsyncClient(base_url=url, timeout=120, verify=False) as http:
        await until_ready(http)
        client = openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http
        )
        question = "Tell me about Ada, who is 36 and likes tea. Answer in JSON."
        answer = await client.chat.completions.parse(
            model="tiny",
            messages=[{"role": "user", "content": question}],
            response_format=Person,
            max_tokens=100,
            temperature=0.2,
            seed=1,
        )
        assert answer.choices[0].finish_reason == "stop"
        assert isinstance(answer.choices[0].message.parsed, Person)

        choice = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "Is the sky blue?"}],
            max_tokens=10,
            extra_body={"structured_outputs": {"choice": ["yes", "no"]}},
        )
        assert choice.choices[0].message.content in {"yes", "no"}
        assert choice.choices[0].finish_reason == "stop"
