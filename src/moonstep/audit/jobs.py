"""Jobs: scenarios and histories in child processes; one that hangs or dies costs itself only."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections import deque
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, TypeAlias

from moonstep.audit import quiet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from moonstep.audit.engineconfig import ConnectorChoice
    from moonstep.audit.shape import Cell, Groups, Shape

SCENARIO_DEADLINE_S = 90.0
HISTORY_DEADLINE_S = 60.0
START_S = 30.0
"""What the first part of a job gets beyond its deadline: a child has to import the engine."""


@dataclass(frozen=True, slots=True)
class ScenarioJob:
    """One scenario in one shape."""

    scenario: str
    shape: Shape
    connector: ConnectorChoice
    variant: str = ""
    groups: Groups = "full"
    cell: Cell | None = None
    deadline_s: float = SCENARIO_DEADLINE_S

    def parts(self) -> Sequence[int]:
        """One part."""
        return (0,)

    def run(self, part: int) -> Any:
        """A `stage.Result`."""
        from moonstep.audit import scenarios
        from moonstep.audit.scenarios.stage import play

        del part
        scenario = scenarios.by_name(self.scenario)
        choice, variant = self.connector, self.variant
        return play(scenario, self.shape, choice, variant, self.groups, cell=self.cell)


@dataclass(frozen=True, slots=True)
class HistoriesJob:
    """Random histories of `steps` engine steps each, by seed."""

    seeds: tuple[int, ...]
    steps: int
    connector: ConnectorChoice
    groups: Groups = "full"
    cell: Cell | None = None
    deadline_s: float = HISTORY_DEADLINE_S

    def parts(self) -> Sequence[int]:
        """Seeds."""
        return self.seeds

    def run(self, part: int) -> Any:
        """A `driver.Outcome`."""
        from moonstep.audit import driver

        return driver.run_seed(part, self.connector, self.steps, self.groups, cell=self.cell)


@dataclass(frozen=True, slots=True)
class ShrinkJob:
    """The finding of a seed, as a short history."""

    seed: int
    steps: int
    connector: ConnectorChoice
    groups: Groups = "full"
    cell: Cell | None = None
    deadline_s: float = 150.0

    def parts(self) -> Sequence[int]:
        """One part."""
        return (0,)

    def run(self, part: int) -> Any:
        """A `replay.Replay`, or None if the finding did not show again."""
        from moonstep.audit import driver, replay, shrink

        del part
        whole = replay.of_seed(self.seed, self.connector, self.steps, self.groups, self.cell)
        finding = driver.run_events(whole.shape, whole.connector, whole.events).finding
        if finding is None:
            return None
        events = shrink.shrink_history(whole.shape, whole.connector, whole.events, finding)
        return replay.Replay(whole.shape, whole.connector, tuple(events))


Job: TypeAlias = ScenarioJob | HistoriesJob | ShrinkJob


@dataclass(frozen=True, slots=True)
class Done:
    """A part of a job came to an end.

    `problem` is None with a `value`, else "deadline" or what became of the child.
    """

    job: Job
    part: int
    value: Any = None
    problem: str | None = None


def _child(pipe: Any, kit_name: str | None, real_store: bool) -> None:
    """Run jobs until the pipe ends. The connector's surroundings are set up once.

    Ctrl-C is the parent's business: it closes the pipe, or ends this process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    quiet.hush()
    import torch

    from moonstep.audit import connectors

    torch.set_num_threads(1)
    if real_store:
        connectors.use_real_store(kit_name)
    with connectors.kit_for(kit_name).surroundings():
        while True:
            try:
                job, parts = pipe.recv()
                for part in parts:
                    pipe.send((part, job.run(part)))
            except (EOFError, BrokenPipeError):
                return


@dataclass(slots=True)
class _Child:
    process: Any
    pipe: Any
    job: Job | None = None
    left: deque[int] = field(default_factory=deque)
    since: float = 0.0


class Pool:
    """Child processes that run jobs; `with` ends them all, whatever happens."""

    def __init__(
        self,
        count: int,
        kit_name: str | None,
        start_s: float = START_S,
        *,
        real_store: bool = False,
    ) -> None:
        self._start_s = start_s
        self._real_store = real_store
        self._context = multiprocessing.get_context("spawn")
        self._kit_name = kit_name
        self._children = [self._start() for _ in range(count)]

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for child in self._children:
            self._end(child)

    def run(
        self, jobs: Sequence[Job], enough: Callable[[], bool] = lambda: False
    ) -> Iterator[Done]:
        """Run jobs; each part is yielded as it ends, in no particular order.

        Once `enough` says so, no further job is begun.
        """
        waiting = deque(jobs)
        while True:
            for index, child in enumerate(self._children):
                if child.job is None and waiting and not enough():
                    self._give(child, waiting.popleft())
                elif child.job is not None:
                    yield from self._overdue(index, child)
            busy = [child for child in self._children if child.job is not None]
            if not busy:
                if waiting and not enough():
                    continue  # all of them were overdue: begin again with fresh ones
                return
            for pipe in wait([child.pipe for child in busy], timeout=0.5):
                child = next(c for c in busy if c.pipe is pipe)
                yield self._receive(child)

    def _receive(self, child: _Child) -> Done:
        job = child.job
        assert job is not None
        try:
            part, value = child.pipe.recv()
        except (EOFError, OSError):
            part = child.left.popleft()
            self._replace(child)
            return Done(job, part, problem="the process died")
        child.left.popleft()
        child.since = time.monotonic()
        if not child.left:
            child.job = None
        return Done(job, part, value)

    def _overdue(self, index: int, child: _Child) -> Iterator[Done]:
        job = child.job
        if job is None or time.monotonic() - child.since < job.deadline_s:
            return
        part = child.left.popleft()
        self._replace(self._children[index])
        yield Done(job, part, problem="deadline")

    def _replace(self, child: _Child) -> None:
        """Start another process in place of one that hangs or died; it takes what is left."""
        job, left = child.job, child.left
        self._end(child)
        fresh = self._start()
        child.process, child.pipe, child.job = fresh.process, fresh.pipe, None
        if job is not None and left:
            child.job, child.since = job, time.monotonic() + self._start_s
            child.pipe.send((job, tuple(left)))

    def _give(self, child: _Child, job: Job) -> None:
        child.job, child.left = job, deque(job.parts())
        child.since = time.monotonic() + self._start_s
        try:
            child.pipe.send((job, tuple(child.left)))
        except OSError:
            self._replace(child)  # it died while it had nothing to do: no fault of this job

    def _start(self) -> _Child:
        here, there = self._context.Pipe()
        process = self._context.Process(
            target=_child, args=(there, self._kit_name, self._real_store), daemon=True, name="audit"
        )
        process.start()
        there.close()
        return _Child(process, here)

    def _end(self, child: _Child) -> None:
        child.pipe.close()
        child.process.join(0.2)
        if child.process.is_alive():
            child.process.kill()
            child.process.join(5.0)
