"""Samples, from this process or carried from workers, as one Prometheus text page."""

import math
from collections.abc import Iterable
from typing import Final

from telemetry.metrics import INSTRUMENT_BY_NAME, Instrument, InstrumentKind, Sample

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_HISTOGRAM_ENDINGS = ("_bucket", "_sum", "_count")


def render(samples: Iterable[Sample]) -> bytes:
    """Render known samples, grouped by metric; of two for the same series the later one counts.

    Workers may run another version during an upgrade: names unknown here are left out.
    """
    families: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for sample in samples:
        instrument = _instrument_of(sample.name)
        if instrument is not None:
            key = (sample.name, tuple(sample.labels.items()))
            families.setdefault(instrument.name, {})[key] = sample.value
    lines: list[str] = []
    for name, series in families.items():
        instrument = INSTRUMENT_BY_NAME[name]
        lines.append(f"# HELP {name} {_escape(instrument.description)}")
        lines.append(f"# TYPE {name} {instrument.kind.value}")
        lines.extend(
            f"{sample_name}{_label_text(labels)} {_number_text(value)}"
            for (sample_name, labels), value in series.items()
        )
    return ("\n".join(lines) + "\n").encode()


def _instrument_of(sample_name: str) -> Instrument | None:
    known = INSTRUMENT_BY_NAME.get(sample_name)
    if known is not None:
        return known
    for ending in _HISTOGRAM_ENDINGS:
        base = INSTRUMENT_BY_NAME.get(sample_name.removesuffix(ending))
        if base is not None and base.kind is InstrumentKind.HISTOGRAM:
            return base
    return None


def _label_text(labels: tuple[tuple[str, str], ...]) -> str:
    if not labels:
        return ""
    inner = ",".join(f'{key}="{_escape(value)}"' for key, value in labels)
    return "{" + inner + "}"


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number_text(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if math.isnan(value) else repr(value)
