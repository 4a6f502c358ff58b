"""Engine: the real scheduler of the installed vLLM, its connector, and stand-ins for the workers.

It runs in one process without a model: `step` does what `EngineCore.step` does (or
`step_with_batch_queue` under asynchronous scheduling), and events are what reaches an engine
core from its clients. Everything that is wrong ends the history with a `Stop`.
"""

from __future__ import annotations

import pickle
import time
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, DraftTokenIds, ModelRunnerOutput

from moonstep.audit import assembly, checks, connectors, engineconfig, history
from moonstep.audit.clients import Clients
from moonstep.audit.findings import Kind, Stop
from moonstep.audit.limits import Limits, QuietTime
from moonstep.audit.oracle import mix
from moonstep.audit.reporter import Reporter
from moonstep.audit.seam import Seam
from moonstep.audit.uncomputed import Uncomputed
from moonstep.audit.work import (
    RequestWork,
    Step,
    propose,
    rejected_in_flight,
    sample_tokens,
    settle,
    works_of,
)

if TYPE_CHECKING:
    from moonstep.audit.engineconfig import ConnectorChoice
    from moonstep.audit.shape import Shape

IDLE_SLEEP_S = 0.001
"""What the engine core sleeps after a step that executed nothing."""


class Engine:
    """One engine of one history."""

    def __init__(
        self, shape: Shape, connector: ConnectorChoice, limits: Limits | None = None
    ) -> None:
        self.shape = shape
        self.connector_name = connector.name
        self.limits = limits or Limits()
        self.reporter = Reporter()
        self.counts = self.reporter.counts
        self.report = self.reporter.report
        self._guard = self.reporter.guard
        self.epoch = 0
        self.kept_watch = checks.KeptWatch()
        self._queue: list[Step] = []
        self._late_aborts: list[str] = []
        self._quiet = QuietTime(self.limits, threads=False)
        self._drafts: dict[str, tuple[int, tuple[int, ...]]] = {}
        self._config = engineconfig.build(shape, connector)
        self.threads = checks.ThreadWatch(connectors.kit_for(connector.name).passing_threads)
        self.scheduler: Any = None
        try:
            with engineconfig.runner_of(shape):
                self._guard("construction", self._assemble_unless_refused)
        except Stop:
            self.threads.close()
            raise
        self.threads.started()

    def _assemble_unless_refused(self) -> None:
        try:
            self._assemble()
        except connectors.kit_for(self.connector_name).refusals as error:
            self.report(Kind.REFUSED, str(error))

    def _assemble(self) -> None:
        config = self._config
        self.scheduler = assembly.make_scheduler(config, self.shape)
        connected = self.scheduler.connector is not None
        groups = config.scheduler_kv.kv_cache_groups
        group_tokens = [int(group.kv_cache_spec.block_size) for group in groups]
        self.seam = Seam(self.scheduler.connector, group_tokens, self.report)
        self.uncomputed = Uncomputed(self.scheduler)
        self.ranks = assembly.make_ranks(
            config, self.shape, connected, self.reporter, self._forgive
        )
        self.seam.install()
        hasher = assembly.make_hasher(config, connected)
        self.clients = Clients(
            self.scheduler, self.shape, hasher, config.hash_block_tokens, self.reporter
        )
        self.inspector = None
        self._store: connectors.StoreControl | None = None
        self._aggregator: Any = None
        if connected:
            self._aggregator = assembly.make_aggregator(self.scheduler, self.ranks)
            assembly.shake_hands(self.scheduler, self.ranks, self.shape)
            halves = [rank.connector for rank in self.ranks]
            kit = connectors.kit_for(self.connector_name)
            kit.adapt(self.scheduler.connector)
            self.inspector = connectors.inspect(self.scheduler.connector, halves)
            self._store = connectors.store_of(self.scheduler.connector)
            threads = kit.in_its_own_time or self._store is not None
            self._quiet = QuietTime(self.limits, threads=threads)

    @property
    def unit_tokens(self) -> int:
        """Where the engine's hits over all groups end: multiples of this."""
        return self._config.scheduler_block_tokens

    @property
    def hash_tokens(self) -> int:
        """Tokens between two of a request's block hashes."""
        return self._config.hash_block_tokens

    def _forgive(self, block: int) -> bool:
        """Whether the engine itself put this block into its prefix cache without computing it."""
        if block in self.uncomputed.blocks:
            self.counts.uncomputed_hits += 1
            return True
        return False

    def apply(self, event: history.Event) -> None:
        """What a client, an operator or time does."""
        match event:
            case history.Step(count):
                for _ in range(count):
                    if not self.step():
                        break
            case history.Arrive(name):
                if not self._in_flight(name):
                    self._guard("add_request", self.clients.arrive, event)
            case history.Extend(name, tokens, variant, output):
                self._guard("add_request", self.clients.extend, name, tokens, variant, output)
            case history.Close(name):
                self._guard("add_request", self.clients.close, name)
            case history.Abort(name, late):
                if name not in self.scheduler.requests:
                    return
                if late and self.scheduler.has_requests():
                    self._late_aborts.append(name)
                else:
                    self._guard("finish_requests", self.clients.abort, name)
            case history.Fault(kind, verbs):
                if self._store is not None:
                    self._store.inject(kind, verbs.split(","))
            case history.Reset(running, connector):
                self._guard("reset_prefix_cache", self._reset, running, connector)

    def _in_flight(self, name: str) -> bool:
        """Whether a step whose output is not processed yet computes for this id.

        The engine would credit that output to the id's next owner, with or without a connector;
        vLLM's front end never uses an id again that early.
        """
        return any(work.request == name for step in self._queue for work in step.works)

    def _reset(self, running: bool, connector: bool) -> None:
        self.counts.resets += 1
        try:
            done = self.scheduler.reset_prefix_cache(running, connector)
        except RuntimeError as error:
            # The engine's own refusal, raised after it has preempted; it lives on.
            if "Failed to reset KV cache" not in str(error):
                raise
            self.counts.refused_resets += 1
            return
        if done and connector:
            self.epoch += 1
        elif not done:
            self.counts.refused_resets += 1

    @property
    def salt(self) -> np.uint64:
        """What tells this epoch's KV from that of before the last full reset ("new weights")."""
        return np.uint64(mix(self.epoch) if self.epoch else 0)

    def step(self) -> bool:
        """One turn of the engine core's loop; False when there was nothing to do."""
        if not self.scheduler.has_requests() and not self._queue:
            self._run_late_aborts()
            return False
        depth = self._config.vllm_config.max_concurrent_batches
        scheduled = None
        if self.scheduler.has_requests():
            scheduled = self._schedule()
            self._queue.append(scheduled)
            if not self.shape.lag:
                self._execute_pending()
            more = scheduled.tokens > 0 or self.scheduler.has_requests()
            if len(self._queue) < depth and more and depth > 1:
                return True
        self._collect(self._queue.pop(0))
        if (scheduled is None or scheduled.tokens == 0) and self.scheduler.has_requests():
            time.sleep(IDLE_SLEEP_S)
        return True

    def empty_step(self) -> None:
        """A step although no request is there; connectors get to hear from their workers."""
        self._queue.append(self._schedule())
        while self._queue:
            self._collect(self._queue.pop(0))

    def _schedule(self) -> Step:
        self.uncomputed.new_step()
        output = self._guard("schedule", self.scheduler.schedule)
        self.uncomputed.after_schedule()
        self.counts.preemptions += len(output.preempted_req_ids or ())
        self.counts.resumes += len(output.scheduled_cached_reqs.resumed_req_ids)
        for new in output.scheduled_new_reqs:
            request = self.scheduler.requests[new.req_id]
            self.counts.resumes += request.num_preemptions > 0
            self.clients.refresh(request)
        sync_loads, async_loads = self.seam.take_loads()
        step = Step(
            number=self.counts.steps,
            output=output,
            salt=self.salt,
            works=works_of(output, self.scheduler.requests, self.clients.sequence),
            sync_loads=sync_loads,
            async_loads=async_loads,
            earlier=list(self._queue),
        )
        self.counts.steps += 1
        self.counts.empty_steps += step.tokens == 0
        self.counts.computed_tokens += step.tokens
        if self.shape.executor == "multi-process":
            step.sent = self._guard("pickling the scheduler output", _pickle, output)
        return step

    def _execute_pending(self) -> None:
        for step in self._queue:
            if not step.results:
                self._execute(step)

    def _execute(self, step: Step) -> None:
        works = [settle(work, step, self._drafts_of(work, step)) for work in step.works]
        for rank in self.ranks:
            output = step.output if step.sent is None else pickle.loads(step.sent)
            result = self._guard("worker", rank.execute, step, output, works)
            if step.sent is not None:
                result = self._guard("pickling the worker's report", _copy, result)
            step.results.append(result)
        for work in works:
            tokens = sample_tokens(work)
            step.sampled[work.request] = tokens
            if work.draft_tokens:
                step.rejected[work.request] = len(work.draft_tokens) - max(len(tokens) - 1, 0)
            if tokens and self.shape.drafts:
                position = work.known_tokens + len(tokens)
                drafts = propose(work.sequence, position, self.shape.drafts)
                self._drafts[work.request] = (position, tuple(drafts))

    def _drafts_of(self, work: RequestWork, step: Step) -> tuple[int, ...]:
        """The drafts that are really there for a work; placeholders become the ranks' own."""
        if not work.draft_tokens or work.draft_tokens[0] != -1:
            return work.draft_tokens
        late = rejected_in_flight(work, step)
        position, drafts = self._drafts.get(work.request, (-1, ()))
        if position == work.known_tokens - late and len(drafts) >= len(work.draft_tokens):
            return drafts[: len(work.draft_tokens)]
        return work.draft_tokens

    def _collect(self, step: Step) -> None:
        if not step.results:
            self._execute(step)
        output = self._model_output(step)
        self._run_late_aborts()
        # Taken before: a request that ends with this output gets its last hash with it.
        requests = [self.scheduler.requests.get(work.request) for work in step.works]
        results = self._guard(
            "update_from_output", self.scheduler.update_from_output, step.output, output
        )
        if self.shape.drafts and not self.shape.asynchronous and step.tokens:
            self._give_drafts(step)
        heard = sum(len(outputs.outputs) for outputs in results.values())
        for outputs in results.values():
            for one in outputs.outputs:
                self.clients.receive(one)
        for request in requests:
            if request is not None:
                self.clients.refresh(request)
        transferred = output.kv_connector_output is not None
        self._watch(step, heard, transferred and not output.kv_connector_output.is_empty())
        checks.after_step(self)

    def _model_output(self, step: Step) -> Any:
        names = [work.request for work in step.works]
        if names:
            output = ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=[step.sampled[name] for name in names],
            )
        else:
            output = EMPTY_MODEL_RUNNER_OUTPUT
        if self.scheduler.connector is None:
            return output
        return self._aggregate(output, step.results)

    def _aggregate(self, output: Any, results: list[Any]) -> Any:
        """The ranks' reports as the executor passes them on.

        The in-process executor leaves out an empty report of a step without a forward
        (`ModelRunnerOutput.with_kv_conn_output_only`); others aggregate whatever there is.
        """
        if self.shape.executor == "in-process" and len(results) == 1:
            if not output.req_ids:
                return ModelRunnerOutput.with_kv_conn_output_only(results[0])
            output.kv_connector_output = results[0]
            return output
        parts = [
            ModelRunnerOutput(
                req_ids=output.req_ids,
                req_id_to_index=output.req_id_to_index,
                sampled_token_ids=output.sampled_token_ids,
                kv_connector_output=result,
            )
            for result in results
        ]
        assert self._aggregator is not None
        return self._guard("aggregating the ranks' reports", self._aggregator.aggregate, parts)

    def _give_drafts(self, step: Step) -> None:
        names = [name for name, tokens in step.sampled.items() if tokens and name in self._drafts]
        drafts = DraftTokenIds(names, [list(self._drafts[name][1]) for name in names])
        self._guard("update_draft_token_ids", self.scheduler.update_draft_token_ids, drafts)

    def _run_late_aborts(self) -> None:
        names, self._late_aborts = self._late_aborts, []
        for name in names:
            self._guard("finish_requests", self.clients.abort, name)

    def _watch(self, step: Step, heard: int, transferred: bool) -> None:
        self._quiet.note(bool(step.tokens or heard or transferred or step.async_loads))
        if self._quiet.is_stalled and not self._end_session_deadlock():
            names = sorted(self.scheduler.requests)
            self.report(Kind.HANG, f"nothing moved for {self._quiet.steps} steps; left: {names}")
        if self.seam.passed_over:
            name, count = self.seam.passed_over.most_common(1)[0]
            if count > self.limits.passed_over:
                self.report(Kind.PASSED_OVER, f"lookup unanswered for {count} steps", name)

    def _end_session_deadlock(self) -> bool:
        """Abort a session that waits for blocks while it holds some: True if there was one.

        vLLM 0.32.0 preempts nobody who waits, so sessions and requests with loaded blocks can hold
        all memory and wait for each other, with any connector that loads asynchronously. That is
        the engine's own; it is counted, and the session's client gives up.
        """
        for request in self.scheduler.kv_holding_waiting:
            if request.resumable:
                self._guard("finish_requests", self.clients.abort, request.request_id)
                self.counts.session_deadlocks += 1
                self._quiet.note(progress=True)
                return True
        return False

    def drain(self) -> None:
        """Close sessions, step until nothing is left, check that all is as at the start."""
        if self._store is not None:
            self._store.clear()
        self._close_sessions()
        for _ in range(self.limits.drain_steps):
            if not self.step():
                checks.at_end(self)
                return
        self.report(Kind.HANG, f"not drained after {self.limits.drain_steps} steps")

    def _close_sessions(self) -> None:
        for name, request in list(self.scheduler.requests.items()):
            if request.resumable:
                self._guard("add_request", self.clients.close, name)

    def shutdown(self) -> None:
        """Shut both halves down as the engine does; an exception is a finding."""
        if self.scheduler.connector is None:
            return
        for rank in self.ranks:
            self._guard("shutdown", rank.connector.shutdown)
        self._guard("shutdown", self.scheduler.shutdown)


def _pickle(output: Any) -> bytes:
    """The scheduler output as bytes, as the multi-process executor sends it once to all ranks."""
    return pickle.dumps(output, pickle.HIGHEST_PROTOCOL)


def _copy(result: Any) -> Any:
    """A worker's report after its way through a pipe."""
    return pickle.loads(pickle.dumps(result, pickle.HIGHEST_PROTOCOL))
