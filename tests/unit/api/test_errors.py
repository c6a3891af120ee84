"""One table of verdicts."""

import pytest

from api.errors import ApiError, Verdict, show, to_api_error
from router import errors as router_errors


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (router_errors.QueueFull("m", 2.0), Verdict.QUEUE_FULL),
        (router_errors.NoWorkers("m", 2.0), Verdict.UNAVAILABLE),
        (router_errors.RequestTimeout("m"), Verdict.TIMEOUT),
        (router_errors.InvalidRequest("m"), Verdict.INVALID),
        (router_errors.NeverFits("m"), Verdict.CONTEXT_LENGTH),
        (router_errors.GenerationFailed("m"), Verdict.FAILED),
        (router_errors.RouterError("m"), Verdict.FAILED),
        (TimeoutError(), Verdict.TIMEOUT),
        (KeyError("/etc/secret"), Verdict.FAILED),
        (ApiError(Verdict.CANCELLED, "m"), Verdict.CANCELLED),
    ],
    ids=repr,
)
def test_every_exception_has_one_verdict(error: Exception, verdict: Verdict) -> None:
    told = to_api_error(error)
    assert told.verdict is verdict
    assert "secret" not in told.message


def test_every_error_of_the_router_is_judged() -> None:
    kinds = {
        kind
        for kind in vars(router_errors).values()
        if isinstance(kind, type) and issubclass(kind, router_errors.RouterError)
    }
    failed = {router_errors.RouterError, router_errors.GenerationFailed}
    for kind in kinds - failed:
        error = kind.__new__(kind)
        error.message = ""  # type: ignore[attr-defined]
        assert to_api_error(error).verdict is not Verdict.FAILED, kind


def test_a_client_s_value_is_shown_only_a_little() -> None:
    assert len(show("x" * 10**6)) < 128
    assert show([1] * 10**6) == "a list"
    assert show({"a": 1}) == "an object"
    assert len(show(10**60)) <= 64


def test_a_message_has_a_bound() -> None:
    assert len(ApiError(Verdict.INVALID, "x" * 10**6).message) == 1024
