"""Engine: the real scheduler of the installed vLLM, its connector, and stand-ins for the workers.

It runs in one process without a model: `step` does what `EngineCore.step` does (or
`step_with_batch_queue` under asynchronous scheduling), and events are what reaches an engine
core from its clients. Everything that is wrong ends the history with a `Stop`.
"""

from __future__ import annotations

import pickle
import time
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from moonstep.audit import checks, connectors, engineconfig, history
from moonstep.audit.findings import Finding, Kind, Stop
from moonstep.audit.kvmemory import RankMemory
from moonstep.audit.oracle import Registry, Sequence, mix, prompt_tokens
from moonstep.audit.parallel import Surroundings, places
from moonstep.audit.rank import HookError, Rank
from moonstep.audit.seam import Seam
from moonstep.audit.uncomputed import Uncomputed
from moonstep.audit.work import (
    RequestWork,
    Step,
    propose,
    rejected_in_flight,
    sample_tokens,
    settle,
)

if TYPE_CHECKING:
    from moonstep.audit.engineconfig import ConnectorChoice
    from moonstep.audit.shape import Shape

IDLE_SLEEP_S = 0.001
"""What the engine core sleeps after a step that executed nothing."""


@dataclass(slots=True)
class Limits:
    """When waiting turns into a finding."""

    stalled_steps: int = 600
    passed_over: int = 1000
    drain_steps: int = 6000


@dataclass(slots=True)
class Client:
    """What the client of one request has asked for and received."""

    sequence: Sequence
    budget: int
    streaming: bool = False
    turns: int = 1
    received: int = 0
    ended: bool = False
    aborted: bool = False


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
    extra: dict[str, int] = field(default_factory=dict)


class Engine:
    """One engine of one history."""

    def __init__(
        self, shape: Shape, connector: ConnectorChoice, limits: Limits | None = None
    ) -> None:
        self.shape = shape
        self.connector_name = connector.name
        self.limits = limits or Limits()
        self.counts = EngineCounts()
        self.clients: dict[str, Client] = {}
        self.registry = Registry()
        self.epoch = 0
        self._config = engineconfig.build(shape, connector)
        self.kept_watch = checks.KeptWatch()
        self._queue: list[Step] = []
        self._late_aborts: list[str] = []
        self._arrivals = 0
        self._quiet_steps = 0
        self._drafts: dict[str, tuple[int, tuple[int, ...]]] = {}
        self.threads = checks.ThreadWatch(connectors.kit_for(connector.name).passing_threads)
        self.scheduler = self._guard("construction", self._make_scheduler)
        self.seam = Seam(
            self.scheduler.connector,
            [int(g.kv_cache_spec.block_size) for g in self._config.scheduler_kv.kv_cache_groups],
            self.report,
        )
        self.uncomputed = Uncomputed(self.scheduler)
        self.ranks = self._guard("construction", self._make_ranks)
        self.seam.install()
        self._aggregator = None
        self._hasher = self._make_hasher()
        self.inspector = None
        if self.scheduler.connector is not None:
            count = self.scheduler.connector.get_finished_count() or len(self.ranks)
            self._aggregator = KVOutputAggregator(count)
            self._hand_shake()
            halves = [rank.connector for rank in self.ranks]
            self.inspector = connectors.inspect(self.scheduler.connector, halves)
        self.threads.started()

    # -- construction ------------------------------------------------------------------------

    def _make_scheduler(self) -> Any:
        config = self._config
        scheduler_class = config.vllm_config.scheduler_config.get_scheduler_cls()
        scheduler = scheduler_class(
            vllm_config=config.vllm_config,
            kv_cache_config=config.scheduler_kv,
            structured_output_manager=StructuredOutputManager(config.vllm_config),
            block_size=config.scheduler_block_tokens,
            hash_block_size=config.hash_block_tokens,
            log_stats=False,
        )
        scheduler.use_v2_model_runner = self.shape.runner == "v2"
        return scheduler

    def _make_ranks(self) -> list[Rank]:
        ranks = []
        for place, kv_config in zip(
            places(self.shape.ranks, self.shape.stages), self._config.rank_kv, strict=True
        ):
            memory = RankMemory(kv_config, self.shape.layout, place.rank)
            surroundings = Surroundings(
                place, {name: _LayerModule(t) for name, t in memory.tensors.items()}
            )
            half = None
            if self.scheduler.connector is not None:
                half = self._make_worker_half(surroundings, place.rank, kv_config, memory)
            ranks.append(
                Rank(
                    memory,
                    surroundings,
                    half,
                    self.shape.runner,
                    self.shape.drafts > 0,
                    self.report,
                    self._forgive,
                )
            )
        return ranks

    def _make_worker_half(
        self, surroundings: Surroundings, rank: int, kv_config: Any, memory: RankMemory
    ) -> Any:
        vllm_config = engineconfig.for_rank(self._config.vllm_config, rank)
        with surroundings.active():
            half = KVConnectorFactory.create_connector(
                config=vllm_config, role=KVConnectorRole.WORKER, kv_cache_config=kv_config
            )
            surroundings.connector = half
            half.register_kv_caches(memory.tensors)
        return half

    def _make_hasher(self) -> Any:
        cache_config = self._config.vllm_config.cache_config
        if not (cache_config.enable_prefix_caching or self.scheduler.connector is not None):
            return None
        hash_function = get_hash_fn_by_name(cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        return get_request_block_hasher(self._config.hash_block_tokens, hash_function)

    def _hand_shake(self) -> None:
        content = {
            (place.stage, place.shard): metadata
            for place, rank in zip(
                places(self.shape.ranks, self.shape.stages), self.ranks, strict=True
            )
            if (metadata := rank.connector.get_handshake_metadata()) is not None
        }
        if content:
            self.scheduler.connector.set_xfer_handshake_metadata_pp_aware(content)

    # -- findings ----------------------------------------------------------------------------

    def report(self, kind: Kind, detail: str, request: str | None = None) -> None:
        """End the history with a finding."""
        raise Stop(Finding(kind, self.counts.steps, detail, request))

    def _guard(self, where: str, call: Any, *args: Any) -> Any:
        """Call into vLLM; an exception is a finding, the connector's or the engine's."""
        try:
            return call(*args)
        except Stop:
            raise
        except HookError as error:
            cause = error.__cause__
            detail = f"{error.hook}: {type(cause).__name__}: {cause}"
            kind, shown = Kind.HOOK_RAISED, cause
        except Exception as error:
            detail = f"{where}: {type(error).__name__}: {error}"
            kind, shown = Kind.ENGINE_DIED, error
        text = "".join(traceback.format_exception(shown))
        raise Stop(Finding(kind, self.counts.steps, detail, None, text))

    def _forgive(self, block: int) -> bool:
        """Whether the engine itself put this block into its prefix cache without computing it."""
        if block in self.uncomputed.blocks:
            self.counts.uncomputed_hits += 1
            return True
        return False

    # -- events ------------------------------------------------------------------------------

    def apply(self, event: history.Event) -> None:
        """What a client, an operator or time does."""
        match event:
            case history.Step(count):
                for _ in range(count):
                    if not self.step():
                        break
            case history.Arrive():
                self._guard("add_request", self._arrive, event)
            case history.Extend(name, tokens, variant, output):
                self._guard("add_request", self._extend, name, tokens, variant, output)
            case history.Close(name):
                self._guard("add_request", self._close, name)
            case history.Abort(name, late):
                if name not in self.scheduler.requests:
                    return
                if late and self.scheduler.has_requests():
                    self._late_aborts.append(name)
                else:
                    self._guard("finish_requests", self._abort, name)
            case history.Reset(running, connector):
                self._guard("reset_prefix_cache", self._reset, running, connector)

    def _request(
        self, name: str, tokens: list[int], output: int, event: history.Arrive | None
    ) -> Any:
        self._arrivals += 1
        parameters = SamplingParams(
            max_tokens=output,
            ignore_eos=True,
            prompt_logprobs=1 if event is not None and event.skip_cache else None,
        )
        return Request(
            request_id=name,
            prompt_token_ids=tokens,
            sampling_params=parameters,
            pooling_params=None,
            arrival_time=float(self._arrivals),
            priority=event.priority if event is not None else 0,
            block_hasher=self._hasher,
            resumable=event.streaming if event is not None else True,
        )

    def _arrive(self, event: history.Arrive) -> None:
        """Add a request, unless its id is in use.

        Sessions are left out where drafts are on: the scheduler of vLLM 0.32.0 then asserts by itself.
        """
        if event.id in self.scheduler.requests or self._in_flight(event.id):
            return
        if event.streaming and self.shape.drafts:
            return
        output = max(1, min(event.output, self.shape.max_tokens - 1))
        count = max(1, min(event.tokens, self.shape.max_tokens - output))
        tokens = self._prompt(event, count)
        request = self._request(event.id, tokens, output, event)
        checks.check_ended(self, event.id)
        self.clients[event.id] = Client(Sequence(tokens), output, event.streaming)
        self.counts.requests += 1
        self.scheduler.add_request(request)
        self._name_hashes(request)

    def _prompt(self, event: history.Arrive, count: int) -> list[int]:
        tokens = prompt_tokens(event.family, event.shared, event.variant, count)
        before = self.clients.get(event.follows)
        if before is not None:
            known = before.sequence.prompt_tokens + before.budget
            shared = min(event.shared, known, count)
            tokens[:shared] = [before.sequence.token(i) for i in range(shared)]
        return tokens

    def _in_flight(self, name: str) -> bool:
        """Whether a step whose output is not processed yet computes for this id.

        The engine would credit that output to the id's next owner, with or without a connector;
        vLLM's front end never uses an id again that early.
        """
        return any(work.request == name for step in self._queue for work in step.works)

    def _extend(self, name: str, count: int, variant: int, output: int) -> None:
        session = self.scheduler.requests.get(name)
        client = self.clients.get(name)
        if session is None or client is None or not client.streaming or client.aborted:
            return
        queued = sum(len(u.prompt_token_ids or ()) for u in session.streaming_queue if u)
        room = self.shape.max_tokens - session.num_tokens - queued - client.budget
        if room < count + output + 1 or None in session.streaming_queue:
            return
        tokens = prompt_tokens(7, 0, variant, count)
        client.turns += 1
        client.budget += output
        self.scheduler.add_request(self._request(name, tokens, output, None))
        self._refresh_session(session)

    def _close(self, name: str) -> None:
        session = self.scheduler.requests.get(name)
        client = self.clients.get(name)
        if session is None or client is None or not client.streaming or client.aborted:
            return
        if None in session.streaming_queue:
            return
        last = self._request(name, [0], 1, None)
        last.resumable = False
        waited = session.status == RequestStatus.WAITING_FOR_STREAMING_REQ
        self.scheduler.add_request(last)
        client.aborted |= waited

    def _abort(self, name: str) -> None:
        if name not in self.scheduler.requests:
            return
        self.clients[name].aborted = True
        self.counts.aborted += 1
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

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

    # -- stepping ----------------------------------------------------------------------------

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
            self._refresh_session(request)
        sync_loads, async_loads = self.seam.take_loads()
        step = Step(
            number=self.counts.steps,
            output=output,
            salt=self.salt,
            works=self._works(output),
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

    def _works(self, output: Any) -> list[RequestWork]:
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        fresh = starts.keys() | cached.resumed_req_ids
        starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        outputs = dict(zip(cached.req_ids, cached.num_output_tokens, strict=True))
        works = []
        for name, count in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            known = request.num_prompt_tokens + outputs.get(name, request.num_output_tokens)
            works.append(
                RequestWork(
                    name,
                    self.clients[name].sequence,
                    starts[name],
                    starts[name] + count,
                    known,
                    tuple(output.scheduled_spec_decode_tokens.get(name, ())),
                    name in fresh,
                )
            )
        return works

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
                self._receive(one)
        for request in requests:
            if request is not None:
                self._refresh_session(request)
                self._name_hashes(request)
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
            self._guard("finish_requests", self._abort, name)

    # -- what clients see --------------------------------------------------------------------

    def _refresh_session(self, request: Any) -> None:
        """A streaming session that has taken in its next input has a new prompt."""
        client = self.clients[request.request_id]
        if not client.streaming or request.num_prompt_tokens == client.sequence.prompt_tokens:
            return
        client.sequence = Sequence(request.prompt_token_ids)
        self._name_hashes(request)

    def _name_hashes(self, request: Any) -> None:
        client = self.clients[request.request_id]
        self.registry.name(request.block_hashes, client.sequence, self._config.hash_block_tokens)

    def _receive(self, output: Any) -> None:
        name = output.request_id
        client = self.clients[name]
        sequence = client.sequence
        for token in output.new_token_ids:
            expected = sequence.token(sequence.next_output)
            if token != expected:
                self.report(
                    Kind.WRONG_OUTPUT,
                    f"output token {client.received} is {token}, not {expected}",
                    name,
                )
            sequence.next_output += 1
            client.received += 1
        reason = output.finish_reason
        if reason is None:
            return
        if str(reason) == "error":
            self.report(
                Kind.FAILED_REQUEST, f"ended with an error after {client.received} tokens", name
            )
        client.turns -= 1
        client.ended = client.turns == 0
        self.counts.finished += client.ended
        if not client.streaming and client.received != client.budget:
            self.report(Kind.WRONG_OUTPUT, f"got {client.received} of {client.budget} tokens", name)

    def _watch(self, step: Step, heard: int, transferred: bool) -> None:
        progress = step.tokens or heard or transferred or step.async_loads
        self._quiet_steps = 0 if progress else self._quiet_steps + 1
        if self._quiet_steps > self.limits.stalled_steps and not self._end_session_deadlock():
            names = sorted(self.scheduler.requests)
            self.report(Kind.HANG, f"nothing moved for {self._quiet_steps} steps; left: {names}")
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
                self._guard("finish_requests", self._abort, request.request_id)
                self.counts.session_deadlocks += 1
                self._quiet_steps = 0
                return True
        return False

    # -- the end -----------------------------------------------------------------------------

    def drain(self) -> None:
        """Step until nothing is left, close open sessions, then check that all is as at the start."""
        self._close_sessions()
        for _ in range(self.limits.drain_steps):
            if not self.step():
                checks.at_end(self)
                return
        self.report(Kind.HANG, f"not drained after {self.limits.drain_steps} steps")

    def _close_sessions(self) -> None:
        for name, request in list(self.scheduler.requests.items()):
            if request.resumable:
                self._guard("add_request", self._close, name)

    def shutdown(self) -> None:
        """Shut both halves down as the engine does; an exception is a finding."""
        if self.scheduler.connector is None:
            return
        for rank in self.ranks:
            self._guard("shutdown", rank.connector.shutdown)
        self._guard("shutdown", self.scheduler.shutdown)


class _LayerModule:
    """What a forward context knows of an attention layer: its KV cache."""

    def __init__(self, kv_cache: Any) -> None:
        self.kv_cache = kv_cache


def _pickle(output: Any) -> bytes:
    """The scheduler output as bytes, as the multi-process executor sends it once to all ranks."""
    return pickle.dumps(output, pickle.HIGHEST_PROTOCOL)


def _copy(result: Any) -> Any:
    """A worker's report after its way through a pipe."""
    return pickle.loads(pickle.dumps(result, pickle.HIGHEST_PROTOCOL))
