"""Findings: what the audit reports, one record for each thing that is wrong."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass
from typing import Any


class Kind(enum.StrEnum):
    """What went wrong. The value is what a report prints."""

    WRONG_KV = "wrong KV used"
    STRAY_WRITE = "stray write"
    WRONG_KEPT = "wrong bytes kept"
    HOOK_RAISED = "hook raised"
    ENGINE_DIED = "engine died"
    BAD_ANSWER = "answer outside the contract"
    BOOKS = "books do not add up"
    LEAK = "leak"
    NOT_IDLE = "work left over"
    HANG = "no progress"
    PASSED_OVER = "request passed over"
    LOST_REQUEST = "request lost"
    FAILED_REQUEST = "request failed"
    WRONG_OUTPUT = "wrong output"
    THREAD_DIED = "thread died"
    UNUSED = "kept and not promised"
    REFUSED = "refused at start"
    NOT_EXERCISED = "scenario did not exercise its case"
    DEADLINE = "deadline passed"


DEADLY = frozenset({Kind.HOOK_RAISED, Kind.ENGINE_DIED, Kind.BAD_ANSWER})
"""Kinds after which a real engine would be gone for all requests."""

HANGING = frozenset({Kind.HANG, Kind.PASSED_OVER, Kind.DEADLINE})
"""Kinds that mean that requests no longer come to an end."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong.

    `step` counts engine steps from 0; `request` is None where no single request
    is concerned; `replay` is a command line that shows the finding again.
    """

    kind: Kind
    step: int
    detail: str
    request: str | None = None
    traceback: str | None = None
    replay: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self) | {"kind": str(self.kind), "name": self.kind.name}


class Stop(Exception):
    """Ends a history at its first finding; carries the finding."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(f"{finding.kind} at step {finding.step}: {finding.detail}")
        self.finding = finding
