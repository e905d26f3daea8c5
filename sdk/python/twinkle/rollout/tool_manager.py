"""Runs the calls a model makes, bounded in time and size; a failure is an answer, never an exception."""

import json
import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any, cast

from twinkle.data_format import Message, ToolCall
from twinkle.data_format import Tool as ToolSpec
from twinkle.rollout.errors import InvalidArguments, InvalidTool
from twinkle.rollout.raised import Raised
from twinkle.rollout.schema import check_arguments
from twinkle.rollout.tool import Tool, ToolFailure, ToolResult

_MOST_ABANDONED = 8
"""Calls that ran out of time and may still run; a thread cannot be ended from outside."""


class ToolManager:
    """The tools of a rollout by name.

    A function that does not end in time is left behind in its thread: one that must end, such as code of a
    model's making, belongs into a process of its own, which the function starts and ends.

    Args:
        tools: tools, or functions to make tools of.
        timeout: for one call.
        max_result_chars: longest text of an answer; the middle of a longer one is left out. At least 64.

    Raises:
        InvalidTool: a function cannot be a tool, or two have one name.
        ValueError: a bound is out of its range.

    Concurrency: any thread.
    """

    def __init__(
        self,
        tools: Iterable[Tool | Callable[..., Any]],
        *,
        timeout: timedelta = timedelta(seconds=30),
        max_result_chars: int = 8192,
    ) -> None:
        if timeout < timedelta():
            raise ValueError(f'timeout must not be negative, got {timeout}')
        if max_result_chars < len(_LEFT_OUT) * 2:
            raise ValueError(f'max_result_chars must be at least {len(_LEFT_OUT) * 2}, got {max_result_chars}')
        self._timeout, self._max_chars = timeout, max_result_chars
        self._tools: dict[str, Tool] = {}
        for given in tools:
            tool = given if isinstance(given, Tool) else Tool.of(given)
            if tool.name in self._tools:
                raise InvalidTool(tool.name, 'is there twice; give one of them another name')
            self._tools[tool.name] = tool
        self._abandoned: list[threading.Thread] = []
        self._lock = threading.Lock()

    @property
    def specs(self) -> list[ToolSpec]:
        """The tools as chat templates show them to a model, in the order given."""
        return [tool.spec for tool in self._tools.values()]

    def call(self, call: ToolCall) -> ToolResult:
        """Run a call and return the message that answers it."""
        function = call.get('function', {})
        name = str(function.get('name', ''))
        tool = self._tools.get(name)
        if tool is None:
            problem = f'there is no tool {name!r}; there are {sorted(self._tools)}'
            return self._answer(call, f'Error: {problem}', ToolFailure.UNKNOWN_TOOL)
        try:
            arguments = check_arguments(_arguments(function), tool.parameters)
        except InvalidArguments as error:
            return self._answer(call, f'Error: {error}', ToolFailure.BAD_ARGUMENTS)
        return self._answer(call, *self._run(tool, arguments))

    def _run(self, tool: Tool, arguments: Mapping[str, Any]) -> tuple[str, ToolFailure | None]:
        with self._lock:
            self._abandoned = [thread for thread in self._abandoned if thread.is_alive()]
            if len(self._abandoned) >= _MOST_ABANDONED:
                return 'Error: earlier calls have not ended yet; try again later', ToolFailure.BUSY
        outcome: queue.SimpleQueue[tuple[str, ToolFailure | None]] = queue.SimpleQueue()
        thread = threading.Thread(
            target=lambda: outcome.put(_outcome(tool, arguments)), name=f'tool-{tool.name}', daemon=True
        )
        thread.start()
        try:
            return outcome.get(timeout=self._timeout.total_seconds())
        except queue.Empty:
            with self._lock:
                self._abandoned.append(thread)
            return f'Error: {tool.name} did not end within {self._timeout.total_seconds():g} s', ToolFailure.TIMEOUT

    def _answer(self, call: ToolCall, text: str, failure: ToolFailure | None) -> ToolResult:
        shown = cut_middle(text, self._max_chars)
        message: dict[str, Any] = {'role': 'tool', 'content': shown}
        if call.get('id'):
            message['tool_call_id'] = call.get('id')
        if call.get('function', {}).get('name'):
            message['name'] = call.get('function', {}).get('name')
        return ToolResult(message=cast('Message', message), failure=failure, is_cut=shown is not text)


_LEFT_OUT = '\n[... the middle is left out ...]\n'


def cut_middle(text: str, max_chars: int) -> str:
    """Return a text, without its middle where it is longer than allowed."""
    if len(text) <= max_chars:
        return text
    room = max_chars - len(_LEFT_OUT)
    return text[: room - room // 2] + _LEFT_OUT + text[len(text) - room // 2 :]


def _arguments(function: Mapping[str, Any]) -> Any:
    """Return a call's arguments, read from JSON where they are text."""
    arguments = function.get('arguments', {})
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments or '{}')
    except (json.JSONDecodeError, RecursionError) as error:
        raise InvalidArguments(f'arguments are not JSON: {error}') from error


def _outcome(tool: Tool, arguments: Mapping[str, Any]) -> tuple[str, ToolFailure | None]:
    """Run a function and put what came of it into words."""
    # Whatever a user's function raises, the end of the interpreter too, is for the model to read.
    raised = Raised()
    with raised:
        value = tool.function(**arguments)
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str), None
    return f'Error: {type(raised.error).__name__}: {raised.error}', ToolFailure.RAISED
