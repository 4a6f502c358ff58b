"""Reporter: turns what goes wrong into a finding, and ends the history with it."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moonstep.audit.findings import Finding, Kind, Stop

if TYPE_CHECKING:
    from collections.abc import Callable


class HookError(Exception):
    """A connector's hook raised; the cause is the exception."""

    def __init__(self, hook: str) -> None:
        super().__init__(hook)
        self.hook = hook


@dataclass(slots=True)
class EngineCounts:
    """How often what happened; scenarios assert on these."""

    steps: int = 0
    empty_steps: int = 0
    computed_tokens: int = 0
    preemptions: int = 0
    resumes: int = 0
    requests: int = 0
    finished: int = 0
    aborted: int = 0
    resets: int = 0
    refused_resets: int = 0
    kept_compared: int = 0
    uncomputed_hits: int = 0
    session_deadlocks: int = 0


class Reporter:
    """Ends a history; knows the step it is at."""

    def __init__(self) -> None:
        self.counts = EngineCounts()

    def report(self, kind: Kind, detail: str, request: str | None = None) -> None:
        """End the history with a finding."""
        raise Stop(Finding(kind, self.counts.steps, detail, request))

    def guard(self, where: str, call: Callable[..., Any], *args: Any) -> Any:
        """Call into vLLM; an exception is a finding, the connector's or the engine's."""
        try:
            return call(*args)
        except Stop:
            raise
        except HookError as error:
            cause: BaseException = error.__cause__ or error
            detail = f"{error.hook}: {type(cause).__name__}: {cause}"
            kind, shown = Kind.HOOK_RAISED, cause
        except Exception as error:
            detail = f"{where}: {type(error).__name__}: {error}"
            kind, shown = Kind.ENGINE_DIED, error
        text = "".join(traceback.format_exception(shown))
        raise Stop(Finding(kind, self.counts.steps, detail, None, text))
