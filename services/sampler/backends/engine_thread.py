"""The thread that runs the torch engine. It runs commands between steps, and delivers events to mailboxes."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog

from twinkle.data_format import SamplingParams
from twinkle.sampler.engine import EngineAdapter, EngineEvent, SamplerEngine, SequenceSoFar, TokenEvent
from twinkle_services.sampler.backends.mailbox import Mailbox
from twinkle_services.sampler.domain.errors import EngineFailed

_Result = TypeVar('_Result')
_log = structlog.get_logger('engine')

_RATE_WINDOW_SECONDS = 5.0
"""Time over which the rate of sampled tokens is averaged."""
_MAX_FAILED_STEPS = 8
"""Number of consecutive failed steps after which the engine is considered failed, for example after a device loss."""


@dataclass(frozen=True)
class _Command:
    """A function to run between two steps."""

    run: Callable[[], Any]
    fail: Callable[[], Any]
    """Called instead of `run` if the thread has stopped."""


@dataclass
class _Reader:
    """The mailbox of a running request, and whether the request is parked because the mailbox is full."""

    mailbox: Mailbox
    is_parked: bool = False
    parked_at: float = 0.0


class EngineThread:
    """Steps an engine until closed.

    Concurrency: `call` and `post` may be called from any thread. The functions passed to them run in the engine's
    thread between two steps; they may use the engine and the methods marked "engine thread only".
    """

    def __init__(self, engine: SamplerEngine, *, stall_seconds: float) -> None:
        """Start the thread, which becomes the owner of `engine`.

        Args:
            engine: Engine to step.
            stall_seconds: Time after which a parked request is aborted if its reader reads no events.
        """
        self.engine = engine
        self.load = engine.load
        """Load of the engine after its last step or command."""
        self._stall_seconds = stall_seconds
        self._readers: dict[str, _Reader] = {}
        self._commands: deque[_Command] = deque()
        self._wakeup = threading.Condition()
        self._is_paused = False
        self._is_closing = False
        self._is_stopped = False
        self._failed_steps = 0
        self._failure: Future[None] = Future()
        self._token_counts: deque[tuple[float, int]] = deque(maxlen=4096)
        self._thread = threading.Thread(target=self._main, name='sampler-engine', daemon=True)
        self._thread.start()

    @property
    def is_paused(self) -> bool:
        """Whether stepping is paused."""
        return self._is_paused

    @property
    def buffered_events(self) -> int:
        """Number of events that wait for their readers."""
        return sum(reader.mailbox.size for reader in list(self._readers.values()))

    @property
    def tokens_per_second(self) -> float:
        """Tokens sampled per second, averaged over the last `_RATE_WINDOW_SECONDS`."""
        begin = time.monotonic() - _RATE_WINDOW_SECONDS
        return sum(count for at, count in list(self._token_counts) if at >= begin) / _RATE_WINDOW_SECONDS

    def post(self, command: Callable[[], Any]) -> None:
        """Run `command` between two steps without waiting for it; it never runs if the thread has stopped."""
        self._post(_Command(command, lambda: None))

    async def call(self, command: Callable[[], _Result]) -> _Result:
        """Run `command` between two steps and return its result.

        Raises:
            EngineFailed: The thread has stopped, or stops before the command runs.
            Exception: The command raised this exception.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_Result] = loop.create_future()

        def run() -> None:
            try:
                result = command()
            except Exception as error:
                loop.call_soon_threadsafe(_settle, future, None, error)
            else:
                loop.call_soon_threadsafe(_settle, future, result, None)

        self._post(_Command(run, lambda: loop.call_soon_threadsafe(_settle, future, None, EngineFailed())))
        return await future

    async def wait_until_failed(self) -> None:
        """Return once the thread has stopped because of an error; otherwise never return."""
        await asyncio.shield(asyncio.wrap_future(self._failure))

    def close(self) -> None:
        """Stop the thread after the current step, and block until it has stopped."""
        with self._wakeup:
            self._is_closing = True
            self._wakeup.notify()
        self._thread.join()

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        adapter: EngineAdapter | None,
        mailbox: Mailbox,
        continued: Sequence[SequenceSoFar] = (),
    ) -> None:
        """Start a request whose events are delivered to `mailbox`; engine thread only.

        Raises:
            SamplerError: See `SamplerEngine.add_request`.
        """
        self.engine.add_request(request_id, prompt, params, adapter=adapter, continued=continued)
        self._readers[request_id] = _Reader(mailbox)

    def abort(self, request_id: str) -> None:
        """Abort a request if it is running, and deliver its last events; engine thread only."""
        if self.engine.is_running(request_id):
            self._deliver(self.engine.abort(request_id))

    def remove(self, request_id: str, mailbox: Mailbox) -> None:
        """Abort a request whose reader has stopped reading, without delivering events; engine thread only."""
        reader = self._readers.get(request_id)
        if reader is None or reader.mailbox is not mailbox:
            return
        del self._readers[request_id]
        if self.engine.is_running(request_id):
            self.engine.abort(request_id)

    def unpark(self, request_id: str) -> None:
        """Continue a parked request whose reader has caught up; engine thread only."""
        reader = self._readers.get(request_id)
        if reader is not None and reader.is_parked:
            reader.is_parked = False
            if self.engine.is_running(request_id):
                self.engine.set_parked(request_id, is_parked=False)

    def set_paused(self, *, is_paused: bool) -> None:
        """Pause or continue stepping; engine thread only."""
        self._is_paused = is_paused

    def fail(self) -> None:
        """Stop the thread with an error; pass this method to `post`.

        Raises:
            EngineFailed: Always.
        """
        raise EngineFailed

    def _post(self, command: _Command) -> None:
        with self._wakeup:
            if not self._is_stopped:
                self._commands.append(command)
                self._wakeup.notify()
                return
        command.fail()

    def _main(self) -> None:
        """Run until closed or until an error, and then fail all pending commands and all readers."""
        try:
            self._run()
        except Exception:
            _log.exception('engine thread failed')
            self._failure.set_result(None)
        with self._wakeup:
            self._is_stopped = True
            commands, self._commands = self._commands, deque()
        for command in commands:
            command.fail()
        for reader in self._readers.values():
            reader.mailbox.fail()

    def _run(self) -> None:
        is_waiting = True
        while self._run_commands(is_waiting=is_waiting):
            self._abort_stalled()
            self.load = self.engine.load
            if self._is_paused:
                is_waiting = True
                continue
            self._deliver(self._step())
            self.load = self.engine.load
            is_waiting = self.engine.last_step_rows == 0

    def _step(self) -> list[EngineEvent]:
        """Run a step; a failed step makes all running requests fail.

        Raises:
            Exception: The last `_MAX_FAILED_STEPS` steps have failed.
        """
        try:
            events = self.engine.step()
        except Exception:
            self._failed_steps += 1
            if self._failed_steps == _MAX_FAILED_STEPS:
                raise
            _log.exception('engine step failed', failed_steps=self._failed_steps)
            self._fail_all()
            return []
        if self.engine.last_step_rows:
            self._failed_steps = 0
        return events

    def _run_commands(self, *, is_waiting: bool) -> bool:
        """Wait for a command if the engine is idle, and run all posted commands; return False if the thread is closing.

        The wait also ends after `stall_seconds` while a request is parked.
        """
        with self._wakeup:
            while is_waiting and not self._commands and not self._is_closing:
                self._wakeup.wait(self._stall_seconds if self._has_parked() else None)
                is_waiting = not self._has_parked()
            commands, self._commands = self._commands, deque()
        for command in commands:
            command.run()
        return not self._is_closing

    def _has_parked(self) -> bool:
        return any(reader.is_parked for reader in self._readers.values())

    def _abort_stalled(self) -> None:
        """Abort requests whose reader has read no events for too long, because they occupy memory that others need."""
        limit = time.monotonic() - self._stall_seconds
        for request_id, reader in list(self._readers.items()):
            if reader.is_parked and reader.parked_at <= limit:
                _log.warning('request ended: reader stalled', request=request_id)
                self.abort(request_id)
                reader.is_parked = False

    def _deliver(self, events: Sequence[EngineEvent]) -> None:
        by_request: dict[str, list[EngineEvent]] = {}
        for event in events:
            by_request.setdefault(event.request_id, []).append(event)
        for request_id, delivered in by_request.items():
            reader = self._readers.get(request_id)
            if reader is None:
                continue
            if reader.mailbox.put(delivered) and not reader.is_parked and self.engine.is_running(request_id):
                reader.is_parked, reader.parked_at = True, time.monotonic()
                self.engine.set_parked(request_id, is_parked=True)
        count = sum(len(event.tokens) for event in events if isinstance(event, TokenEvent))
        self._token_counts.append((time.monotonic(), count))

    def _fail_all(self) -> None:
        for request_id, reader in self._readers.items():
            if self.engine.is_running(request_id):
                self.engine.abort(request_id)
            reader.mailbox.fail()


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.cancelled():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
