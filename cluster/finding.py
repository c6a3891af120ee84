"""One line of what `relevo doctor` says."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"  # serves, but not as it could
    PROBLEM = "problem"  # will not serve


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What was looked at, what it is, and what to do about it."""

    check: str
    level: Level
    text: str
    advice: str = ""


def ok(check: str, text: str) -> Finding:
    """All is well."""
    return Finding(check=check, level=Level.OK, text=text)


def warning(check: str, text: str, advice: str) -> Finding:
    """It will serve; slower, or with less room."""
    return Finding(check=check, level=Level.WARNING, text=text, advice=advice)


def problem(check: str, text: str, advice: str) -> Finding:
    """It will not serve."""
    return Finding(check=check, level=Level.PROBLEM, text=text, advice=advice)


def has_problem(findings: Iterable[Finding]) -> bool:
    """Whether something must be done first."""
    return any(finding.level is Level.PROBLEM for finding in findings)
