"""The table between exceptions and statuses, both ways."""

import pickle

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata

from rpc import errors
from rpc.status import build_status, code_of, from_rpc_error, to_status

CLASSES = [
    each
    for each in vars(errors).values()
    if isinstance(each, type) and issubclass(each, errors.WorkerError)
]
OURS = [each for each in CLASSES if each is not errors.WorkerError]


def failed_call(parts):
    return AioRpcError(
        parts.code, Metadata(), Metadata(*parts.trailing_metadata), details=parts.details
    )


def transport_failure(code):
    return AioRpcError(code, Metadata(), Metadata(), details="from gRPC")


@pytest.mark.parametrize("error_class", OURS)
@pytest.mark.parametrize("retry_after_s", [None, 0.0, 1.25])
def test_every_error_arrives_as_what_it_was(error_class, retry_after_s):
    sent = error_class("why", retry_after_s=retry_after_s)
    received = from_rpc_error(failed_call(to_status(sent)))
    assert type(received) is error_class
    assert str(received) == "why"
    assert received.retry_after_s == retry_after_s


@pytest.mark.parametrize("error_class", OURS)
def test_every_error_has_a_code_of_its_own_and_survives_pickling(error_class):
    assert code_of(error_class("x")) is not grpc.StatusCode.UNKNOWN
    copy = pickle.loads(pickle.dumps(error_class("why", retry_after_s=2.0)))  # noqa: S301
    assert (type(copy), str(copy), copy.retry_after_s) == (error_class, "why", 2.0)


@pytest.mark.parametrize(
    ("error", "code", "arrives_as"),
    [
        (ValueError("bad"), grpc.StatusCode.INVALID_ARGUMENT, errors.InvalidRequestError),
        (UnicodeError("bad"), grpc.StatusCode.INVALID_ARGUMENT, errors.InvalidRequestError),
        (TimeoutError(), grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineError),
        (KeyError("secret"), grpc.StatusCode.INTERNAL, errors.RequestFailedError),
        (RuntimeError("secret"), grpc.StatusCode.INTERNAL, errors.RequestFailedError),
    ],
)
def test_plain_exceptions_have_a_status_too(error, code, arrives_as):
    parts = to_status(error)
    assert parts.code is code
    assert "secret" not in parts.details
    assert type(from_rpc_error(failed_call(parts))) is arrives_as


@pytest.mark.parametrize("code", [each for each in grpc.StatusCode if each.value[0] != 0])
def test_every_status_of_the_transport_has_a_meaning(code):
    expected = {
        "DEADLINE_EXCEEDED": errors.DeadlineError,
        "UNAUTHENTICATED": errors.UnauthenticatedError,
        "INVALID_ARGUMENT": errors.InvalidRequestError,
        "RESOURCE_EXHAUSTED": errors.InvalidRequestError,
        "UNIMPLEMENTED": errors.RequestFailedError,
    }
    received = from_rpc_error(transport_failure(code))
    assert type(received) is expected.get(code.name, errors.WorkerUnavailableError)


def test_an_unknown_reason_of_a_newer_worker_is_read_by_its_code():
    parts = build_status(grpc.StatusCode.UNAVAILABLE, "x", reason="FromTheFutureError")
    assert type(from_rpc_error(failed_call(parts))) is errors.WorkerUnavailableError


def test_garbled_details_are_no_second_failure():
    garbled = Metadata(("grpc-status-details-bin", b"\xff\xff\xff"))
    call = AioRpcError(grpc.StatusCode.UNAVAILABLE, Metadata(), garbled, details="x")
    assert type(from_rpc_error(call)) is errors.WorkerUnavailableError


def test_a_long_message_is_cut_so_that_the_metadata_stays_small():
    parts = to_status(errors.RequestFailedError("é" * 100_000))
    assert len(parts.details) == 1024
    assert len(parts.trailing_metadata[0][1]) < 4096
