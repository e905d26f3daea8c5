"""The chat of an environment's program, which asks for the model's turns instead of answering them.

`ProgramChat` passes requests and turns between the program and `ProgramEnv`; `chat_endpoint` receives the requests.
"""

import queue
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, cast

from twinkle.blocking import next_item
from twinkle.data_format import Message, Tool, ToolCall
from twinkle.rollout.errors import InvalidTurnRequest, TurnInProgress

_ROLES: Mapping[str, Literal['system', 'user', 'assistant', 'tool']] = {
    'system': 'system',
    'developer': 'system',
    'user': 'user',
    'assistant': 'assistant',
    'tool': 'tool',
}
_MAX_REPEATS = 16
"""Maximum number of repetitions of a request that has received its turn. Without a limit, a program that repeats a
request to get another turn would not end."""


@dataclass(frozen=True, kw_only=True)
class TurnRequest:
    """A program's request for the next turn of the model."""

    messages: list[Message]
    """The complete chat."""
    tools: list[Tool]
    """Tools that the model may call in this turn."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A turn of the model."""

    content: str
    """Text without the calls."""
    tool_calls: Sequence[ToolCall] = ()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of a program."""

    reward: float
    facts: Mapping[str, float] = field(default_factory=dict[str, float])
    """Numbers to report."""


class ProgramChat:
    """Passes a program's requests to its environment, and the model's turns back.

    A client may repeat a request, for example after its own time limit. A request that equals the previous one
    gets the same turn: it waits for the turn while it is being sampled, and otherwise gets it immediately.

    Concurrency: the program and the environment run in different threads. The program asks for one turn at a time.
    """

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url
        """Address at which the program asks for turns, for clients of OpenAI's API."""
        self._events: queue.SimpleQueue[TurnRequest | Outcome | BaseException] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._request: TurnRequest | None = None
        """The newest request."""
        self._turn: Future[Turn | None] = Future()
        """Turn of the newest request."""
        self._repeat_count = 0
        """Number of repetitions of the newest request after it received its turn."""
        self._is_closed = False

    def ask(self, request: TurnRequest) -> Turn | None:
        """Wait for the next turn and return it; None if the model has no turn left.

        Raises:
            TurnInProgress: a different request is waiting for a turn.
            InvalidTurnRequest: the request was repeated too often after its turn.
        """
        with self._lock:
            if self._is_closed:
                return None
            if self._request is None or (request != self._request and self._turn.done()):
                self._request, self._turn, self._repeat_count = request, Future(), 0
                self._events.put(request)
            elif request != self._request:
                raise TurnInProgress
            elif self._turn.done() and self._turn.result() is not None:
                self._count_repeat()
            turn = self._turn
        return turn.result()

    def finish(self, result: Outcome | BaseException) -> None:
        """Report the program's outcome, or the error that ended it."""
        self._events.put(result)

    def next_event(self, timeout: timedelta) -> TurnRequest | Outcome:
        """Return the program's next request, or its outcome.

        Raises:
            TimeoutError: the program did neither within `timeout`.
            BaseException: the error that ended the program.
        """
        seconds = timeout.total_seconds()
        try:
            event = next_item(self._events, seconds)
        except queue.Empty:
            raise TimeoutError(
                f'the program of the environment neither asked for a turn nor ended within {seconds:g} s; '
                f'raise timeout='
            ) from None
        if isinstance(event, BaseException):
            raise event
        return event

    def reply(self, turn: Turn | None) -> None:
        """Answer the program's request; None refuses it. After `close`, the method has no effect."""
        with self._lock:
            self._set_turn(turn)

    def close(self) -> None:
        """Refuse the current request, if any, and all later requests."""
        with self._lock:
            self._is_closed = True
            self._set_turn(None)

    def _set_turn(self, turn: Turn | None) -> None:
        if not self._turn.done():
            self._turn.set_result(turn)

    def _count_repeat(self) -> None:
        self._repeat_count += 1
        if self._repeat_count > _MAX_REPEATS:
            raise InvalidTurnRequest(
                f'the request was repeated {self._repeat_count} times after its turn, and gets the same turn each '
                f'time; add messages to it'
            )


def turn_request(given: Mapping[str, Any]) -> TurnRequest:
    """Return the request in the fields of a call of OpenAI's chat completions.

    Sampling parameters in it are ignored: those of the rollout apply.

    Raises:
        InvalidTurnRequest: a field is malformed, or the request asks for several completions, or has content other than
            text.
    """
    if given.get('n') not in (None, 1):
        raise InvalidTurnRequest(f'n must be 1, got {given["n"]!r}; the rollout creates the samples')
    messages = given.get('messages')
    if not isinstance(messages, list) or not messages:
        raise InvalidTurnRequest('messages must be a list with at least one message')
    listed = cast('list[Any]', messages)
    tools: Any = given.get('tools') or []
    if not isinstance(tools, list):
        raise InvalidTurnRequest(f'tools must be a list, got {tools!r:.80}')
    return TurnRequest(
        messages=[_message(message, f'messages[{index}]') for index, message in enumerate(listed)],
        tools=[_tool(tool, f'tools[{index}]') for index, tool in enumerate(cast('list[Any]', tools))],
    )


def _message(given: Any, path: str) -> Message:
    fields = cast('dict[str, Any]', given if isinstance(given, dict) else {})
    role: Any = fields.get('role')
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidTurnRequest(f'{path}.role must be one of {sorted(_ROLES)}, got {role!r}')
    message: Message = {'role': _ROLES[role], 'content': _text(fields.get('content'), path)}
    if fields.get('tool_calls'):
        message['tool_calls'] = fields['tool_calls']
    if fields.get('tool_call_id'):
        message['tool_call_id'] = str(fields['tool_call_id'])
    return message


def _text(content: Any, path: str) -> str:
    """Return the text of a message's content, which may be given in parts."""
    if content is None or isinstance(content, str):
        return content or ''
    parts = cast('list[Any]', content) if isinstance(content, list) else [content]
    for index, part in enumerate(parts):
        if not isinstance(part, dict) or cast('dict[str, Any]', part).get('type') != 'text':
            raise InvalidTurnRequest(f'{path}.content[{index}] must be a part of type text, got {part!r:.80}')
    return ''.join(str(part.get('text', '')) for part in parts)


def _tool(given: Any, path: str) -> Tool:
    fields = cast('dict[str, Any]', given if isinstance(given, dict) else {})
    if fields.get('type') != 'function' or not isinstance(fields.get('function'), dict):
        raise InvalidTurnRequest(f'{path} must be a function tool, got {given!r:.80}')
    return {'type': 'function', 'function': fields['function']}
