"""Runs tool calls with limits on time and result size. A failed call returns a message and raises no error."""

import json
import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any, cast

from twinkle.blocking import next_item
from twinkle.component import ErrorCapture
from twinkle.data_format import Message, ToolCall
from twinkle.data_format import Tool as ToolSpec
from twinkle.rollout.errors import InvalidArguments, InvalidTool
from twinkle.rollout.schema import check_arguments
from twinkle.rollout.tool import Tool, ToolFailure, ToolResult

_MAX_ABANDONED = 8
"""Maximum number of calls that may still run after their timeout. Further calls are refused until one ends."""


class ToolManager:
    """The tools of a rollout, by name.

    A call that times out continues to run in its thread, because a thread cannot be stopped from outside. A tool that
    runs untrusted or model-generated code should therefore run that code in a process, and stop the process.

    Args:
        tools: tools, or functions to convert to tools.
        timeout: time limit of one call.
        max_result_chars: maximum length of a result, at least 68; the middle of a longer text is removed.

    Raises:
        InvalidTool: a function cannot be a tool, or two tools have the same name.
        ValueError: a limit is out of range.

    Concurrency: safe from any thread.
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
                raise InvalidTool(tool.name, 'two tools have this name; rename one of them')
            self._tools[tool.name] = tool
        self._abandoned: list[threading.Thread] = []
        self._lock = threading.Lock()

    @property
    def specs(self) -> list[ToolSpec]:
        """The tools in the format of chat templates, in the given order."""
        return [tool.spec for tool in self._tools.values()]

    def call(self, call: ToolCall) -> ToolResult:
        """Run a call and return its result; a failure is part of the result."""
        function = call.get('function', {})
        name = str(function.get('name', ''))
        tool = self._tools.get(name)
        if tool is None:
            problem = f'there is no tool {name!r}; the tools are {sorted(self._tools)}'
            return self._result(call, f'Error: {problem}', ToolFailure.UNKNOWN_TOOL)
        try:
            arguments = check_arguments(_arguments(function), tool.parameters)
        except InvalidArguments as error:
            return self._result(call, f'Error: {error}', ToolFailure.BAD_ARGUMENTS)
        return self._result(call, *self._run(tool, arguments))

    def _run(self, tool: Tool, arguments: Mapping[str, Any]) -> tuple[str, ToolFailure | None]:
        with self._lock:
            self._abandoned = [thread for thread in self._abandoned if thread.is_alive()]
            if len(self._abandoned) >= _MAX_ABANDONED:
                return 'Error: earlier calls have not finished yet; try again later', ToolFailure.BUSY
        outcome: queue.SimpleQueue[tuple[str, ToolFailure | None]] = queue.SimpleQueue()
        thread = threading.Thread(
            target=lambda: outcome.put(_outcome(tool, arguments)), name=f'tool-{tool.name}', daemon=True
        )
        thread.start()
        try:
            return next_item(outcome, self._timeout.total_seconds())
        except queue.Empty:
            with self._lock:
                self._abandoned.append(thread)
            return f'Error: {tool.name} did not finish within {self._timeout.total_seconds():g} s', ToolFailure.TIMEOUT

    def _result(self, call: ToolCall, text: str, failure: ToolFailure | None) -> ToolResult:
        shortened = cut_middle(text, self._max_chars)
        message: dict[str, Any] = {'role': 'tool', 'content': shortened}
        if call.get('id'):
            message['tool_call_id'] = call.get('id')
        if call.get('function', {}).get('name'):
            message['name'] = call.get('function', {}).get('name')
        return ToolResult(message=cast('Message', message), failure=failure, is_cut=shortened is not text)


_LEFT_OUT = '\n[... the middle is left out ...]\n'


def cut_middle(text: str, max_chars: int) -> str:
    """Return the text, with its middle removed if it is longer than `max_chars`."""
    if len(text) <= max_chars:
        return text
    space = max_chars - len(_LEFT_OUT)
    return text[: space - space // 2] + _LEFT_OUT + text[len(text) - space // 2 :]


def _arguments(function: Mapping[str, Any]) -> Any:
    """Return the arguments of a call; a string is parsed as JSON."""
    arguments = function.get('arguments', {})
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments or '{}')
    except (json.JSONDecodeError, RecursionError) as error:
        raise InvalidArguments(f'arguments are not JSON: {error}') from error


def _outcome(tool: Tool, arguments: Mapping[str, Any]) -> tuple[str, ToolFailure | None]:
    """Run a function and return its result as text, with the kind of failure."""
    # Any error of the user's function, including SystemExit, is reported to the model.
    capture = ErrorCapture()
    with capture:
        value = tool.function(**arguments)
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str), None
    return f'Error: {type(capture.error).__name__}: {capture.error}', ToolFailure.RAISED
