"""What a request cost, as OpenAI and Groq write it."""

from collections.abc import Sequence
from dataclasses import dataclass

from relevo.v1 import inference_pb2

from api.text_stream import TextStream
from router.report import RequestReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Sums over the choices of one request; total is prompt + completion, in tokens and in time."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int
    queue_time_s: float  # in no sum
    prompt_time_s: float
    completion_time_s: float
    kv_transfer_time_s: float  # overlaps the others, in no sum

    @classmethod
    def of(cls, streams: Sequence[TextStream]) -> "Usage":
        """Add up the streams of one request."""
        reports = [stream.report for stream in streams]
        return cls(
            prompt_tokens=sum(stream.num_prompt_tokens for stream in streams),
            completion_tokens=sum(stream.num_tokens for stream in streams),
            cached_tokens=sum(report.cached_tokens for report in reports),
            reasoning_tokens=sum(stream.num_reasoning_tokens for stream in streams),
            queue_time_s=sum(report.queue_time_s for report in reports),
            prompt_time_s=sum(report.prompt_time_s for report in reports),
            completion_time_s=sum(report.completion_s for report in reports),
            kv_transfer_time_s=sum(report.kv_transfer_s for report in reports),
        )

    @property
    def total_time_s(self) -> float:
        """Time without the queue."""
        return self.prompt_time_s + self.completion_time_s

    def to_dict(self) -> dict[str, object]:
        """Return the `usage` object of the HTTP API."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            **self.times(),
        }

    def times(self) -> dict[str, object]:
        """Return the times by Groq's names, in seconds."""
        return {
            "queue_time": self.queue_time_s,
            "prompt_time": self.prompt_time_s,
            "completion_time": self.completion_time_s,
            "total_time": self.total_time_s,
            "kv_transfer_time": self.kv_transfer_time_s,
        }

    def to_proto(self) -> inference_pb2.Usage:
        """Return the message of the gRPC API."""
        return inference_pb2.Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            cached_tokens=self.cached_tokens,
            queue_time_s=self.queue_time_s,
            prompt_time_s=self.prompt_time_s,
            completion_time_s=self.completion_time_s,
            total_time_s=self.total_time_s,
            kv_transfer_time_s=self.kv_transfer_time_s,
            reasoning_tokens=self.reasoning_tokens,
        )


def server_timing(report: RequestReport) -> str:
    """Return a Server-Timing header in milliseconds, without the parts not yet known."""
    parts = {
        "queue": report.queue_time_s,
        "prefill": report.prompt_time_s,
        "kv": report.kv_transfer_s,
        "decode": report.completion_s,
    }
    return ", ".join(f"{name};dur={1e3 * part:.3f}" for name, part in parts.items() if part > 0)


def x_relevo(streams: Sequence[TextStream]) -> dict[str, object]:
    """Return who served a request and what moved; the workers are those of its first prompt."""
    reports = [stream.report for stream in streams]
    return {
        "request_id": streams[0].request_id,
        "prefill_worker": reports[0].prefill_worker_id or None,
        "decode_worker": reports[0].last_decode_worker_id or reports[0].decode_worker_id or None,
        "cached_tokens": {
            "prefill": sum(report.cached_prefill for report in reports),
            "decode": sum(report.cached_decode for report in reports),
        },
        "kv_transfer_bytes": sum(report.kv_transfer_bytes for report in reports),
    }


def served_by(stream: TextStream) -> inference_pb2.ServedBy:
    """Return the same for the gRPC API, where the request's id stands beside it."""
    report = stream.report
    return inference_pb2.ServedBy(
        prefill_worker=report.prefill_worker_id,
        decode_worker=report.last_decode_worker_id or report.decode_worker_id,
        cached_tokens_prefill=report.cached_prefill,
        cached_tokens_decode=report.cached_decode,
        kv_transfer_bytes=report.kv_transfer_bytes,
    )
