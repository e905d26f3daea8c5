"""Environments that are programs: a program runs a chat by asking for the model's turns, and returns a reward.

This inverts the interface of `Env`: `reset` starts the program and returns the chat of its first request, and `step`
answers the request and returns the messages that the program has added in its next request.
"""

import asyncio
import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from datetime import timedelta
from typing import Any, Protocol, cast

from twinkle.blocking import join, wait_for, wait_for_all
from twinkle.component import ErrorCapture
from twinkle.data_format import Message, ToolCall, Trajectory
from twinkle.rollout.chat_endpoint import ChatEndpoint
from twinkle.rollout.env import EnvStep
from twinkle.rollout.errors import ProgramFailed
from twinkle.rollout.program_chat import Outcome, ProgramChat, Turn, TurnRequest

_CLOSE_SECONDS = 30.0
"""Maximum wait for the end of a cancelled program."""


class Program(Protocol):
    """The program of one chat. Its methods run in the event loop of a `ProgramHost`."""

    async def run(self, endpoint: ChatEndpoint, chat: ProgramChat) -> Outcome:
        """Run the chat to its end. The program asks for turns at `chat.base_url`.

        An error of this method is raised by the rollout.
        """
        ...

    def stop(self) -> None:
        """Prepare the program for the refusal of its current request, because the model has no turn left."""
        ...


class CallParser(Protocol):
    """The part of a template that finds tool calls; `twinkle.template.Template` implements it."""

    def parse_tool_call(self, text: str, tools: Any = ()) -> list[ToolCall]:
        """Return the calls in a turn."""
        ...

    def clean_tool_call(self, text: str) -> str:
        """Return a turn without its calls."""
        ...


class ProgramHost:
    """An event loop in a thread for programs, and the endpoint at which they ask for turns.

    Args:
        serving: context that is open in the loop while programs run.

    Concurrency: `start` is safe from any thread.
    """

    def __init__(self, serving: Callable[[], AbstractAsyncContextManager[Any]]) -> None:
        self.endpoint = ChatEndpoint()
        self.loop = asyncio.new_event_loop()
        self._serving = serving
        self._capture, self._is_ready, self._end = ErrorCapture(), threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=self._run, name='environment-programs', daemon=True)

    def open(self) -> None:
        """Start the loop and enter the context; raise the error of the context. An interrupt closes the host."""
        try:
            self._thread.start()
            wait_for(self._is_ready)
        except BaseException:
            self.close()
            raise
        if self._capture.error is not None:
            self.close()

    def start(self, program: Program) -> tuple[ProgramChat, Future[None]]:
        """Start a program; return its chat, and a future that cancels the program when it is cancelled."""
        chat = self.endpoint.open_chat()
        return chat, asyncio.run_coroutine_threadsafe(_report(program, self.endpoint, chat), self.loop)

    def close(self) -> None:
        """Cancel all programs, leave the context and stop the loop; raise the error of the context."""
        # A thread of a program that waits for a turn cannot be cancelled.
        self.endpoint.close_chats()
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._end.set)
        join(self._thread)
        self.endpoint.close()
        if self._capture.error is not None:
            raise self._capture.error

    def _run(self) -> None:
        with self._capture, asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.run(self._serve())
        self._is_ready.set()

    async def _serve(self) -> None:
        async with self._serving():
            self._is_ready.set()
            await self._end.wait()


async def _report(program: Program, endpoint: ChatEndpoint, chat: ProgramChat) -> None:
    """Run a program, and report its outcome or its error to the environment."""
    capture = ErrorCapture()
    with capture:
        chat.finish(await program.run(endpoint, chat))
    if isinstance(capture.error, asyncio.CancelledError):
        raise capture.error
    if capture.error is not None:
        chat.finish(capture.error)


class ProgramEnv:
    """The environment of one chat that a program runs.

    The program's reward is the reward of the last turn. If the model has no turn left and the program asks for one, the
    request is refused, and the fact `refused_turns` is 1.

    Args:
        host: runs the program.
        program_of: returns the program for a trajectory.
        parser: finds tool calls in the model's turns, such as the sampler's template. None: programs with tools are
            refused.
        timeout: maximum time until the program asks for its next turn or ends.
    """

    def __init__(
        self,
        host: ProgramHost,
        program_of: Callable[[Trajectory], Program],
        *,
        parser: CallParser | None,
        timeout: timedelta,
    ) -> None:
        self._host, self._program_of, self._parser, self._timeout = host, program_of, parser, timeout
        self._program: Program | None = None
        self._chat: ProgramChat | None = None
        self._future: Future[None] | None = None
        self._request = TurnRequest(messages=[], tools=[])
        self._call_count = 0

    def reset(self, trajectory: Trajectory, *, seed: int | None) -> Trajectory:
        """Start the program and return the chat of its first request. The seed is ignored.

        Raises:
            ProgramFailed: the program ended without a request, or offers tools and there is no parser.
            TimeoutError: the program did not ask for a turn in time.
        """
        del seed
        self._program = self._program_of(trajectory)
        self._chat, self._future = self._host.start(self._program)
        event = self._chat.next_event(self._timeout)
        if isinstance(event, Outcome):
            raise ProgramFailed('it ended without asking for a turn of the model')
        if event.tools and self._parser is None:
            raise ProgramFailed("it offers tools, so calls must be found in turns; pass the sampler's template=")
        self._request = event
        tools: dict[str, Any] = {'tools': event.tools} if event.tools else {}
        return cast('Trajectory', {**trajectory, 'messages': event.messages, **tools})

    def step(self, message: Message, *, is_last: bool) -> EnvStep:
        """Pass the turn to the program; return its next messages, or its reward if it ends.

        Raises:
            ProgramFailed: the program continues a different chat.
            TimeoutError: the program neither asked for a turn nor ended in time.
        """
        assert self._chat is not None  # noqa: S101 - `reset` is called first
        self._chat.reply(self._turn(str(message.get('content', ''))))
        event = self._chat.next_event(self._timeout)
        if isinstance(event, Outcome):
            return EnvStep(reward=event.reward, facts=event.facts, is_done=True)
        if is_last:
            outcome = self._refuse()
            return EnvStep(reward=outcome.reward, facts={**outcome.facts, 'refused_turns': 1.0})
        added = _added(self._request.messages, event.messages)
        self._request = event
        return EnvStep(messages=added)

    def close(self) -> None:
        """Cancel the program if it is running, and wait until it has ended."""
        if self._chat is None or self._future is None:
            return
        self._host.endpoint.close_chat(self._chat)
        self._future.cancel()
        wait_for_all([self._future], _CLOSE_SECONDS)

    def _refuse(self) -> Outcome:
        """Refuse the program's requests until it ends, and return its outcome."""
        assert self._chat is not None and self._program is not None  # noqa: S101, PT018 - `reset` is called first
        self._host.loop.call_soon_threadsafe(self._program.stop)
        while True:
            self._chat.reply(None)
            event = self._chat.next_event(self._timeout)
            if isinstance(event, Outcome):
                return event

    def _turn(self, text: str) -> Turn:
        tools = self._request.tools
        if not tools or self._parser is None:
            return Turn(content=text)
        calls = self._parser.parse_tool_call(text, tools)
        return Turn(
            content=self._parser.clean_tool_call(text) if calls else text, tool_calls=list(map(self._call, calls))
        )

    def _call(self, call: ToolCall) -> ToolCall:
        """Return a call in the form of OpenAI's API, with an id that is unique in the chat."""
        function = call.get('function', {})
        arguments = function.get('arguments', {})
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        self._call_count += 1
        named: Any = {'name': function.get('name', ''), 'arguments': text}
        return {'id': f'call_{self._call_count}', 'type': 'function', 'function': named}


def _added(before: list[Message], after: list[Message]) -> list[Message]:
    """Return the messages that a request has after the earlier messages and the model's turn.

    Raises:
        ProgramFailed: the request does not continue the chat.
    """
    count = len(before)
    is_grown = len(after) > count + 1 and after[count].get('role') == 'assistant'
    if not is_grown or list(map(_identity, before)) != list(map(_identity, after[:count])):
        raise ProgramFailed(
            f'its next request does not add messages to the {count} messages of the chat and the turn of the model; '
            f'only programs with one growing chat are supported'
        )
    return after[count + 1 :]


def _identity(message: Message) -> tuple[str, Any]:
    """Return the role and content; None as the content of the model's turns, which a program may store differently."""
    role = message.get('role', '')
    return role, None if role == 'assistant' else message.get('content')
