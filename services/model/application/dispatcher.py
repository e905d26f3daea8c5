"""Runs ready verbs on the engine. An adapter runs one verb at a time; verbs of several adapters can share a batch.

The scheduler selects the verbs that run next. Only one batch runs at a time; new verbs are collected for the next one.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import cast

import structlog
from opentelemetry import trace

from twinkle_services.kit.clock import Clock
from twinkle_services.kit.errors import Cancelled, DomainError, Draining, Internal
from twinkle_services.kit.telemetry import measures, spans
from twinkle_services.kit.worker import completed
from twinkle_services.model.application.waits import ChangeNotifier, ShortWork
from twinkle_services.model.domain.adapter import Adapter
from twinkle_services.model.domain.engine import BatchPart, UnfinishedVerb, VerbRun
from twinkle_services.model.domain.operation import (
    BatchVerb,
    ComputeVerb,
    ForwardBackward,
    ForwardOnly,
    Operation,
    StateVerb,
    token_count,
)
from twinkle_services.model.domain.pace import Pace, ThinkTimes
from twinkle_services.model.domain.scheduler import ReadyVerb, Scheduler, VerbsAhead
from twinkle_services.model.ports import TrainerBackend

_log = structlog.get_logger('dispatcher')
_GATHERING_SHARE = 0.2
"""Share of a batch's duration that may be spent waiting for more verbs to join it."""
_FULL_GATHERING_SHARE = 0.02
"""The same share for a batch that is full already. It waits only for quick verbs, such as steps, which run first."""


@dataclass(frozen=True, kw_only=True)
class QueuePosition:
    """Position of an operation in the queue."""

    operation_count: int
    """Number of operations ahead."""
    estimated_wait: timedelta
    """Estimated time until the operation starts."""


@dataclass(eq=False)
class _Submission:
    """A verb in the dispatcher and the future of its result."""

    ready: ReadyVerb
    """The verb with the tokens that have not run yet."""
    verb: ComputeVerb
    arrival: float
    outcome: 'asyncio.Future[VerbRun]'
    span: trace.SpanContext | None = None
    """Span of the operation; None if it is not recorded."""
    begin: float | None = None
    """Start time of the first pass; None before the first pass."""
    is_paused: bool = False
    """Whether the engine has begun the verb and no pass of it is running."""
    cancellation: DomainError | None = None
    """Error with which the verb ends after the running pass, unless this is its last pass."""

    def settle(self, outcome: 'VerbRun | BaseException') -> None:
        """Complete the future, unless it is done; a result receives the time from the submission to the first pass."""
        if self.outcome.done():
            return
        if isinstance(outcome, BaseException):
            self.outcome.set_exception(outcome)
        else:
            begin = self.arrival if self.begin is None else self.begin
            run = replace(outcome, wait_seconds=begin - self.arrival)
            self._measure(run)
            self.outcome.set_result(run)

    def _measure(self, run: 'VerbRun') -> None:
        verb = type(self.verb).__name__
        measures.queue_wait.record(run.wait_seconds, verb)
        measures.operation_seconds.record(run.device_seconds, verb)
        if tokens := token_count(self.verb):
            measures.trained_tokens.add(tokens, verb)
            measures.padding_tokens.add(run.padding_token_count)
            measures.shared_tokens.add(run.shared_token_count)


class Dispatcher:
    """Runs compute verbs.

    Concurrency: use it from one event loop only. `run` may be awaited by many tasks, but only one per adapter. A
    background task runs the batches while the queue is not empty; `close` stops it.
    """

    def __init__(
        self,
        backend: TrainerBackend,
        scheduler: Scheduler,
        clock: Clock,
        *,
        batch_seconds: float | None = None,
        short_work: ShortWork | None = None,
    ) -> None:
        """Initialize the dispatcher.

        Args:
            backend: The engine.
            scheduler: Scheduler that orders the verbs; used by this dispatcher only.
            clock: Clock with which batches are timed.
            batch_seconds: Target duration of a batch with tokens, estimated from earlier batches. None: batches are
                limited by tokens only.
            short_work: Short work on the engine, for which the next batch waits; None if there is no such work.
        """
        self._backend = backend
        self._short_work = short_work or ShortWork()
        self._scheduler = scheduler
        self._clock = clock
        self._batch_seconds = batch_seconds
        self._pace = Pace()
        self._think_times = ThinkTimes()
        self._changed = ChangeNotifier()
        """Signals changes of the scheduler's queue."""
        self._gathered = 0.0
        """Seconds spent waiting for more verbs since the last batch with tokens."""
        self._waiting: dict[str, _Submission] = {}
        self._running: dict[str, _Submission] = {}
        self._begin = 0.0
        """Start time of the running batch."""
        self._loop: asyncio.Task[None] | None = None
        self._is_closed = False

    async def run(self, adapter: Adapter, operation: Operation) -> VerbRun:
        """Run the operation's verb once it is scheduled, and return the engine's result with the waiting time.

        Cancellation: a waiting operation is withdrawn; a running operation completes its pass.

        Raises:
            DomainError: The engine refused the verb, the verb failed, or this error was given to `cancel`.
            Cancelled: `cancel` was called before the operation's last pass; the adapter did not change.
            Draining: The service shut down before the operation's last pass; the adapter did not change.
        """
        if self._is_closed:
            raise Draining()
        submission = self._submission_of(adapter, operation)
        self._scheduler.add(submission.ready)
        self._waiting[adapter.adapter_id] = submission
        self._think_times.record_arrival(adapter.adapter_id, submission.arrival)
        self._changed.notify()
        if self._loop is None or self._loop.done():
            self._loop = asyncio.create_task(self._run_all(), name='dispatcher')
            self._loop.add_done_callback(self._on_loop_done)
        try:
            return await submission.outcome
        finally:
            if self._waiting.get(adapter.adapter_id) is submission:
                self._withdraw(submission)
            if submission.is_paused:
                await completed(self._backend.abandon(adapter.adapter_id))

    def cancel(self, adapter_id: str, error: DomainError | None = None) -> bool:
        """Cancel the adapter's operation with `error` or Cancelled; return False if none can be cancelled.

        A running operation ends after the current pass. If this pass is the last one, the operation completes, although
        True is returned.
        """
        error = error or Cancelled()
        if submission := self._waiting.get(adapter_id):
            self._withdraw(submission)
            submission.settle(error)
            return True
        submission = self._running.get(adapter_id)
        if submission is None or submission.ready.batch_key is None:
            return False
        submission.cancellation = error
        return True

    def position_of(self, adapter_id: str) -> QueuePosition | None:
        """Return the queue position of an adapter's operation; None if the operation has begun or does not exist."""
        submission = self._waiting.get(adapter_id)
        ahead = None if submission is None or submission.is_paused else self._scheduler.ahead_of(adapter_id)
        if ahead is None:
            return None
        return QueuePosition(
            operation_count=len(self._running) + ahead.quick_count + ahead.heavy_count,
            estimated_wait=self._remaining() + self._pace.estimate(ahead),
        )

    def waiting_by_verb(self) -> Mapping[str, int]:
        """Return the number of waiting operations by the name of their verb."""
        return Counter(type(submission.verb).__name__ for submission in list(self._waiting.values()))

    def estimate_time(self, operation_count: int) -> timedelta:
        """Estimate the duration of `operation_count` consecutive operations of one adapter."""
        return self._pace.mean_time * operation_count

    async def close(self) -> None:
        """Refuse waiting verbs, and wait for the running pass; its unfinished verbs are refused, too."""
        self._is_closed = True
        for adapter_id in [*self._waiting, *self._running]:
            self.cancel(adapter_id, Draining())
        if self._loop is not None:
            await asyncio.wait([self._loop])

    def _submission_of(self, adapter: Adapter, operation: Operation) -> _Submission:
        verb = operation.verb
        assert not isinstance(verb, StateVerb)  # noqa: S101 - state verbs do not use the dispatcher
        ready = ReadyVerb(
            adapter_id=adapter.adapter_id,
            tenant_id=adapter.tenant_id,
            token_count=token_count(verb),
            batch_key=_batch_key(adapter, verb),
        )
        outcome = asyncio.get_running_loop().create_future()
        return _Submission(ready, verb, self._clock.monotonic(), outcome, spans.current())

    def _withdraw(self, submission: _Submission) -> None:
        del self._waiting[submission.ready.adapter_id]
        self._scheduler.remove(submission.ready.adapter_id)
        # The dispatcher may be waiting for this verb.
        self._changed.notify()

    def _remaining(self) -> timedelta:
        """Estimate the remaining time of the running batch."""
        verbs = [submission.ready for submission in self._running.values()]
        tokens = sum(map(self._scheduler.pass_tokens_of, verbs))
        total = self._pace.estimate(VerbsAhead(quick_count=0 if tokens else len(verbs), token_count=tokens))
        return max(timedelta(), total - timedelta(seconds=self._clock.monotonic() - self._begin))

    async def _run_all(self) -> None:
        while len(self._scheduler):
            await self._gather()
            await self._short_work.wait()
            # The batch is empty if all verbs were withdrawn during the wait.
            if batch := self._scheduler.next_batch():
                await self._run_together(batch)

    async def _run_together(self, batch: Sequence[ReadyVerb]) -> None:
        """Run a batch and complete its futures."""
        self._begin = self._clock.monotonic()
        self._running = {ready.adapter_id: self._waiting.pop(ready.adapter_id) for ready in batch}
        submissions = list(self._running.values())
        outcomes = await self._run_batch(submissions)
        self._update_statistics(submissions, outcomes)
        self._record_spans(submissions)
        cancelled: list[_Submission] = []
        for submission, outcome in zip(submissions, outcomes, strict=True):
            submission.begin = self._begin if submission.begin is None else submission.begin
            if not isinstance(outcome, UnfinishedVerb):
                submission.settle(outcome)
            elif submission.cancellation is not None or submission.outcome.done():
                cancelled.append(submission)
            else:
                self._pause(submission, outcome)
        for submission in cancelled:
            await self._abandon(submission)
        self._running = {}

    def _pause(self, submission: _Submission, outcome: UnfinishedVerb) -> None:
        """Let a verb wait for its next pass."""
        submission.is_paused = True
        submission.ready = replace(submission.ready, token_count=outcome.remaining_token_count, has_begun=True)
        del self._running[submission.ready.adapter_id]
        self._waiting[submission.ready.adapter_id] = submission
        self._scheduler.add(submission.ready)

    async def _abandon(self, submission: _Submission) -> None:
        """End a verb that was cancelled during a pass."""
        error = submission.cancellation or Cancelled()
        try:
            await self._backend.abandon(submission.ready.adapter_id)
        except DomainError as failure:
            error = failure
        submission.settle(error)

    async def _gather(self) -> None:
        """Wait briefly for adapters whose next operation is expected soon, so that their batches share a pass.

        Without this wait, adapters whose operations arrive at different times would never share a pass. The wait is a
        small share of the batch's duration; it is skipped if a verb without tokens is ready.
        """
        while (seconds := self._gathering_time()) > 0.0:
            begin = self._clock.monotonic()
            try:
                async with asyncio.timeout(seconds):
                    await self._changed.wait()
            except TimeoutError:
                return
            finally:
                self._gathered += self._clock.monotonic() - begin

    def _gathering_time(self) -> float:
        next_pass = self._scheduler.next_pass()
        if next_pass is None:
            return 0.0
        batch_time = self._pace.estimate(VerbsAhead(token_count=next_pass.token_count))
        share = _FULL_GATHERING_SHARE if next_pass.is_full else _GATHERING_SHARE
        limit = share * batch_time.total_seconds()
        now = self._clock.monotonic()
        return min(self._think_times.latest_expected(now, limit=limit) - now, limit - self._gathered)

    def _update_statistics(
        self, submissions: Sequence[_Submission], outcomes: 'Sequence[VerbRun | UnfinishedVerb | BaseException]'
    ) -> None:
        """Update the timing statistics after a batch."""
        now, token_count = self._clock.monotonic(), 0
        for submission, outcome in zip(submissions, outcomes, strict=True):
            ran = self._scheduler.pass_tokens_of(submission.ready)
            if not isinstance(outcome, BaseException):
                rest = outcome.remaining_token_count if isinstance(outcome, UnfinishedVerb) else 0
                ran = submission.ready.token_count - rest
                self._scheduler.charge(submission.ready, ran)
            token_count += ran
        self._pace.observe(now - self._begin, token_count=token_count)
        if submissions[0].ready.batch_key is not None:
            measures.pass_seconds.record(now - self._begin)
            measures.pass_rows.record(token_count)
            measures.pass_adapters.record(len(submissions))
        if token_count:
            self._gathered = 0.0
            if self._batch_seconds is not None:
                self._scheduler.bound(self._pace.tokens_in(self._batch_seconds))
        for submission, outcome in zip(submissions, outcomes, strict=True):
            if not isinstance(outcome, UnfinishedVerb):
                self._think_times.record_finish(submission.ready.adapter_id, now)

    def _record_spans(self, submissions: Sequence[_Submission]) -> None:
        """Record the pass, and the wait before it, in the trace of each operation, with links to the other traces."""
        traced = [(submission, submission.span) for submission in submissions if submission.span is not None]
        now = self._clock.monotonic()
        for submission, span in traced:
            if submission.begin is None:
                age = now - submission.arrival
                spans.add_past('queue', span, begin_age=age, end_age=now - self._begin)
            spans.add_past(
                'engine' if submission.ready.batch_key is None else 'pass',
                span,
                begin_age=now - self._begin,
                links=[other for _, other in traced if other is not span],
                adapter_count=len(submissions),
                token_count=sum(self._scheduler.pass_tokens_of(other.ready) for other in submissions),
            )

    async def _run_batch(
        self, submissions: Sequence[_Submission]
    ) -> 'Sequence[VerbRun | UnfinishedVerb | BaseException]':
        """Run a pass of verbs, or a single verb; if the engine raises an exception, it is the outcome of every verb."""
        if submissions[0].ready.batch_key is None:
            running = asyncio.ensure_future(self._run_alone(submissions[0]))
        else:
            parts = [
                BatchPart(adapter_id=own.ready.adapter_id, verb=None if own.is_paused else cast('BatchVerb', own.verb))
                for own in submissions
            ]
            for submission in submissions:
                submission.is_paused = False
            running = asyncio.ensure_future(self._backend.run_pass(parts))
        await asyncio.wait([running])
        error = running.exception()
        return running.result() if error is None else [error] * len(submissions)

    async def _run_alone(self, submission: _Submission) -> Sequence[VerbRun]:
        return [await self._backend.run(submission.ready.adapter_id, submission.verb)]

    def _on_loop_done(self, loop: 'asyncio.Task[None]') -> None:
        """Fail all pending operations if the background task failed because of a defect."""
        error = None if loop.cancelled() else loop.exception()
        if error is None and not loop.cancelled():
            return
        _log.error('dispatcher failed', exc_info=error)
        unfinished = [*self._running.values(), *self._waiting.values()]
        self._running, self._waiting = {}, {}
        for submission in unfinished:
            self._scheduler.remove(submission.ready.adapter_id)
            submission.settle(Internal(''))


def _batch_key(adapter: Adapter, verb: ComputeVerb) -> str | None:
    if adapter.is_full_parameter:
        # Full-parameter training does not use the weights of the shared base model.
        return None
    if isinstance(verb, ForwardBackward):
        return 'training'
    return 'evaluation' if isinstance(verb, ForwardOnly) else None
