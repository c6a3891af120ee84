"""Random requests off our own OpenAPI document: right ones and wrong ones, never a 5xx.

The same ones each time, for half a minute; `make soak` gives it MINUTES of ever new ones.
"""

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from api.openapi.document import openapi_document
from api.tokenizer import Tokenizer
from tests.integration.api.conftest import ANSWER, open_site
from tests.integration.api.scoring import scoring
from tests.long_form import IS_LONG

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
BUDGET_S = 60 * float(os.environ.get("RELEVO_SOAK_MINUTES", "0.5"))
QUIET = settings(
    max_examples=12,
    derandomize=not IS_LONG,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture
def url(model_path: Path, tokenizer: Tokenizer) -> Iterator[str]:
    """An ingress in a thread of its own: schemathesis is not of the asynchronous kind."""
    urls: list[str] = []
    is_up, is_over = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with open_site(model_path, tokenizer) as site:
            site.router.script = scoring(ANSWER, size=len(ANSWER))
            urls.append(f"http://127.0.0.1:{site.ingress.http_port}")
            is_up.set()
            await is_over.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert is_up.wait(30)
    yield urls[0]
    loop.call_soon_threadsafe(is_over.set)
    thread.join(30)
    loop.close()


def named(body: Any) -> Any:
    """The served model's name: no generator would guess it."""
    return {**body, "model": "tiny"} if isinstance(body, dict) and "model" in body else body


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.timeout(int(BUDGET_S) + 150)
def test_no_request_off_the_document_breaks_the_server_or_the_document(url: str) -> None:
    schema = schemathesis.openapi.from_dict(openapi_document("1"))
    operations = [result.ok() for result in schema.get_all_operations()]
    started_at, statuses = time.monotonic(), set()

    def check(operation: Any, mode: GenerationMode) -> None:
        @QUIET
        @given(case=operation.as_strategy(generation_mode=mode))
        def run(case: Any) -> None:
            if time.monotonic() - started_at > BUDGET_S:
                return
            case.body = named(case.body)
            response = case.call(base_url=url, timeout=60)
            statuses.add(response.status_code)
            case.validate_response(response, checks=CHECKS)

        run()

    while True:
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            for operation in operations:
                if operation.method == "post" or mode is GenerationMode.POSITIVE:
                    check(operation, mode)
        if not IS_LONG or time.monotonic() - started_at > BUDGET_S:
            break
    assert {200, 400} <= statuses
