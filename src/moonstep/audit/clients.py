"""Clients: who sends requests to the engine, and checks what comes back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request, RequestStatus

from moonstep.audit.findings import Kind
from moonstep.audit.oracle import Registry, Sequence, prompt_tokens

if TYPE_CHECKING:
    from moonstep.audit.history import Arrive
    from moonstep.audit.reporter import Reporter
    from moonstep.audit.shape import Shape


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


class Clients:
    """All clients of one engine, by request id. Calls into the scheduler are not guarded here."""

    def __init__(
        self, scheduler: Any, shape: Shape, hasher: Any, hash_tokens: int, reporter: Reporter
    ) -> None:
        self.by_id: dict[str, Client] = {}
        self.registry = Registry()
        self._scheduler = scheduler
        self._shape = shape
        self._hasher = hasher
        self._hash_tokens = hash_tokens
        self._reporter = reporter
        self._arrivals = 0

    def sequence(self, name: str) -> Sequence:
        """The tokens of a request."""
        return self.by_id[name].sequence

    def arrive(self, event: Arrive) -> None:
        """Send a request, unless its id is in use.

        Sessions are left out where drafts are on: there vLLM 0.32.0's scheduler asserts by itself.
        """
        if event.id in self._scheduler.requests or (event.streaming and self._shape.drafts):
            return
        self.check_ended(event.id)
        output = max(1, min(event.output, self._shape.max_tokens - 1))
        count = max(1, min(event.tokens, self._shape.max_tokens - output))
        tokens = self._prompt(event, count)
        request = self._request(event.id, tokens, output, event)
        self.by_id[event.id] = Client(Sequence(tokens), output, event.streaming)
        self._reporter.counts.requests += 1
        self._scheduler.add_request(request)
        self._name_hashes(request)

    def extend(self, name: str, count: int, variant: int, output: int) -> None:
        """Send a session's next input, if it is open and there is room."""
        session = self._open_session(name)
        if session is None:
            return
        client = self.by_id[name]
        queued = sum(len(update.prompt_token_ids or ()) for update in session.streaming_queue)
        room = self._shape.max_tokens - session.num_tokens - queued - client.budget
        if room < count + output + 1:
            return
        client.turns += 1
        client.budget += output
        tokens = prompt_tokens(7, 0, variant, count)
        self._scheduler.add_request(self._request(name, tokens, output, None))
        self.refresh(session)

    def close(self, name: str) -> None:
        """Say that a session gets no more input."""
        session = self._open_session(name)
        if session is None:
            return
        last = self._request(name, [0], 1, None)
        last.resumable = False
        waited = session.status == RequestStatus.WAITING_FOR_STREAMING_REQ
        self._scheduler.add_request(last)
        self.by_id[name].aborted |= waited

    def abort(self, name: str) -> None:
        """Go away."""
        if name not in self._scheduler.requests:
            return
        self.by_id[name].aborted = True
        self._reporter.counts.aborted += 1
        self._scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def refresh(self, request: Any) -> None:
        """Take in what the engine did to a request: a session's new prompt, new block hashes."""
        client = self.by_id[request.request_id]
        if client.streaming and request.num_prompt_tokens != client.sequence.prompt_tokens:
            client.sequence = Sequence(request.prompt_token_ids)
        self._name_hashes(request)

    def receive(self, output: Any) -> None:
        """Check one `EngineCoreOutput` against what the tokens before it demand."""
        name = output.request_id
        client = self.by_id[name]
        sequence = client.sequence
        for token in output.new_token_ids:
            expected = sequence.token(sequence.next_output)
            if token != expected:
                detail = f"output token {client.received} is {token}, not {expected}"
                self._reporter.report(Kind.WRONG_OUTPUT, detail, name)
            sequence.next_output += 1
            client.received += 1
        if output.finish_reason is not None:
            self._end(name, client, str(output.finish_reason))

    def check_ended(self, name: str) -> None:
        """A request that the scheduler no longer knows came to an end its client has heard of."""
        client = self.by_id.get(name)
        if client is None or client.ended or client.aborted or client.streaming:
            return
        detail = f"no end after {client.received} tokens"
        self._reporter.report(Kind.LOST_REQUEST, detail, name)

    def _end(self, name: str, client: Client, reason: str) -> None:
        if reason == "error":
            detail = f"ended with an error after {client.received} tokens"
            self._reporter.report(Kind.FAILED_REQUEST, detail, name)
        client.turns -= 1
        client.ended = client.turns == 0
        self._reporter.counts.finished += client.ended
        if not client.streaming and client.received != client.budget:
            detail = f"got {client.received} of {client.budget} tokens"
            self._reporter.report(Kind.WRONG_OUTPUT, detail, name)

    def _open_session(self, name: str) -> Any:
        """The request of a session that can still be extended, or None."""
        session = self._scheduler.requests.get(name)
        client = self.by_id.get(name)
        if session is None or client is None or not client.streaming or client.aborted:
            return None
        return None if None in session.streaming_queue else session

    def _prompt(self, event: Arrive, count: int) -> list[int]:
        tokens = prompt_tokens(event.family, event.shared, event.variant, count)
        before = self.by_id.get(event.follows)
        if before is not None:
            known = before.sequence.prompt_tokens + before.budget
            shared = min(event.shared, known, count)
            tokens[:shared] = [before.sequence.token(i) for i in range(shared)]
        return tokens

    def _request(self, name: str, tokens: list[int], output: int, event: Arrive | None) -> Any:
        self._arrivals += 1
        skips_cache = event is not None and event.skip_cache
        return Request(
            request_id=name,
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(
                max_tokens=output, ignore_eos=True, prompt_logprobs=1 if skips_cache else None
            ),
            pooling_params=None,
            arrival_time=float(self._arrivals),
            priority=event.priority if event is not None else 0,
            block_hasher=self._hasher,
            resumable=event.streaming if event is not None else True,
        )

    def _name_hashes(self, request: Any) -> None:
        sequence = self.by_id[request.request_id].sequence
        self.registry.name(request.block_hashes, sequence, self._hash_tokens)
