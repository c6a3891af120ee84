"""The verdict on a request as a gRPC status with google.rpc details."""

from collections.abc import Sequence

from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from api.errors import ApiError

ERROR_DOMAIN = "relevo"
DETAILS_KEY = "grpc-status-details-bin"


def status_metadata(error: ApiError, request_label: str) -> tuple[tuple[str, str | bytes], ...]:
    """Return the trailing metadata that carry the details."""
    status = status_pb2.Status(
        code=error.face.grpc_code.value[0],
        message=error.message,
        details=[_pack(detail) for detail in _details(error, request_label)],
    )
    return (("x-request-id", request_label), (DETAILS_KEY, status.SerializeToString()))


def _details(error: ApiError, request_label: str) -> Sequence[Message]:
    details: list[Message] = [
        error_details_pb2.ErrorInfo(reason=error.face.code.upper(), domain=ERROR_DOMAIN),
        error_details_pb2.RequestInfo(request_id=request_label),
    ]
    if error.param is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.param, description=error.message
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(max(1, round(1e3 * error.retry_after_s)))
        details.append(retry)
    return details


def _pack(detail: Message) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(detail)
    return packed
