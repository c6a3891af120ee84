import pytest
from starlette.datastructures import Headers

from api.errors import ApiError
from api.request_timeout import TIMEOUT_HEADER, read_timeout_s


@pytest.mark.parametrize(("text", "timeout_s"), [("1", 1.0), ("0.25", 0.25), ("1e3", 1000.0)])
def test_seconds_are_read(text: str, timeout_s: float) -> None:
    assert read_timeout_s(Headers({TIMEOUT_HEADER: text})) == timeout_s


def test_without_the_header_there_is_none() -> None:
    assert read_timeout_s(Headers({})) is None


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon", "", "1s", "9" * 5000])
def test_what_is_no_time_is_refused_by_name(text: str) -> None:
    with pytest.raises(ApiError) as refused:
        read_timeout_s(Headers({TIMEOUT_HEADER: text}))
    assert refused.value.param == TIMEOUT_HEADER
    assert len(str(refused.value)) < 500
