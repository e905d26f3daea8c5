"""Unit tests of environments whose programs ask for turns over HTTP."""

import asyncio
import json
import signal
import socket
import threading
import tracemalloc
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import pytest
from openai import APIStatusError, OpenAI

from fixtures.chat_templates import HERMES
from fixtures.letter_environments import LetterProgram, RunningPrograms, post
from fixtures.scripted_sampler import ScriptedSampler
from fixtures.tiny_model import build_tiny_tokenizer
from twinkle.blocking import join
from twinkle.rollout import EndReason, InvalidTurnRequest, MultiTurnRollout, ProgramFailed
from twinkle.rollout.chat_endpoint import ChatEndpoint
from twinkle.rollout.program_chat import Outcome, Turn
from twinkle.rollout.program_env import ProgramHost
from twinkle.template import Template

CHAT: Any = {'messages': [{'role': 'user', 'content': 'hi'}], 'user_data': [('number', '3')]}
TOOL: Any = {'type': 'function', 'function': {'name': 'add', 'parameters': {'type': 'object', 'properties': {}}}}
CALL = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope='module')
def template(tmp_path_factory: pytest.TempPathFactory) -> Template:
    """ChatML with the byte tokenizer, in which each character is a token."""
    folder: Path = tmp_path_factory.mktemp('tokenizer')
    build_tiny_tokenizer(folder)
    (folder / 'chat_template.jinja').write_text(HERMES)
    return Template(str(folder), max_length=100_000)


class Programs:
    """Creates programs and keeps them."""

    def __init__(self, kind: type[Any] = LetterProgram, **options: Any) -> None:
        self.kind, self.options = kind, options
        self.made: list[Any] = []

    def __call__(self, trajectory: Any) -> Any:
        """Create a program."""
        self.made.append(self.kind(trajectory, **self.options))
        return self.made[-1]


class Custom(LetterProgram):
    """A program with a function as its body."""

    def __init__(self, trajectory: Any, body: Any) -> None:
        super().__init__(trajectory)
        self.body = body

    async def run(self, endpoint: Any, chat: Any) -> Outcome:
        """Run the body."""
        del endpoint
        await asyncio.to_thread(self.body, chat.base_url)
        return Outcome(reward=1.0)


def say(prompt: str, seed: int | None) -> str:
    """Return letters in the first turn, and half digits in the second."""
    del seed
    return 'ab12' if 'More.' in prompt else 'abcd'


def test_rollouts_contain_the_chats_of_programs(template: Template) -> None:
    """A rollout has the messages, tokens, reward and facts of its program's chat."""
    sampler = ScriptedSampler(template, say)
    with RunningPrograms(LetterProgram) as envs:
        assert envs.is_serving
        first, second = MultiTurnRollout(sampler, env=envs, num_samples=2)(CHAT, seed=1)
    assert not envs.is_serving
    for rollout in (first, second):
        assert [message['content'] for message in rollout.messages] == ['hi', 'abcd', 'More.', 'ab12']
        assert (rollout.rewards, rollout.facts, rollout.end_reason) == ([0.0, 0.75], {'turns': 2.0}, EndReason.DONE)
        assert rollout.feature['user_data'] == CHAT['user_data']
        assert rollout.sampled_count == len('abcdab12') + 2


def test_program_without_a_turn_left_is_scored(template: Template) -> None:
    """A request after the last turn gets an error that clients know, and the program's outcome is the reward."""
    programs = Programs()
    with RunningPrograms(programs) as envs:
        (rollout,) = MultiTurnRollout(ScriptedSampler(template, say), env=envs, max_turns=1)(CHAT, seed=1)
    assert rollout.rewards == [1.0]
    assert rollout.facts == {'turns': 1.0, 'refused_turns': 1.0}
    assert rollout.end_reason is EndReason.MAX_TURNS
    assert programs.made[0].is_stopped
    assert programs.made[0].answers[-1]['error']['code'] == 'context_length_exceeded'


def test_calls_in_turns_become_calls_of_the_response(template: Template) -> None:
    """A program with tools receives calls with unique ids, and the text without them."""
    programs = Programs(fields={'tools': [TOOL]})
    sampler = ScriptedSampler(template, lambda *_: CALL)
    with RunningPrograms(programs, parser=template) as envs:
        (rollout,) = MultiTurnRollout(sampler, env=envs)(CHAT, seed=1)
    first, second = (answer['choices'][0] for answer in programs.made[0].answers)
    assert first['finish_reason'] == second['finish_reason'] == 'tool_calls'
    assert first['message']['content'].strip() == 'I add.'
    (call,) = first['message']['tool_calls']
    assert call['function'] == {'name': 'add', 'arguments': '{"a": 1}'}
    assert call['id'] != second['message']['tool_calls'][0]['id']
    assert '"name": "add"' in template.decode(sampler.prompts[0])
    assert rollout.facts['turns'] == 2.0


def test_streamed_turns_equal_complete_turns(template: Template) -> None:
    """OpenAI's SDK reads the same message from a stream."""
    messages: list[Any] = []

    def ask(base_url: str) -> None:
        with OpenAI(base_url=base_url, api_key='none', max_retries=0) as client:
            request: Any = {'model': 'any', 'messages': CHAT['messages'], 'tools': [TOOL]}
            with client.chat.completions.stream(**request) as stream:
                messages.append(stream.get_final_completion().choices[0].message)

    with RunningPrograms(Programs(Custom, body=ask), parser=template) as envs:
        (rollout,) = MultiTurnRollout(ScriptedSampler(template, lambda *_: CALL), env=envs)(CHAT, seed=1)
    (message,) = messages
    assert rollout.reward == 1.0
    assert message.content.strip() == 'I add.'
    assert message.tool_calls[0].function.arguments == '{"a": 1}'


@pytest.mark.parametrize(
    ('body', 'field'),
    [
        (b'{', 'JSON'),
        ([], 'object'),
        ({'messages': []}, 'messages'),
        ({'messages': CHAT['messages'], 'n': 2}, 'n must be 1'),
        ({'messages': [{'role': 'robot', 'content': ''}]}, 'messages[0].role'),
        ({'messages': [{'role': 'user', 'content': [{'type': 'image_url'}]}]}, 'messages[0].content[0]'),
        ({'messages': CHAT['messages'], 'tools': [{'type': 'custom'}]}, 'tools[0]'),
        ({'messages': CHAT['messages'], 'tools': 5}, 'tools must be a list'),
        (bytes((64 << 20) + 1), 'length of at most'),
    ],
)
def test_invalid_requests_are_raised_and_answered(body: Any, field: str) -> None:
    """The environment raises the error that the program receives; both name the field."""
    answers: list[Any] = []
    with RunningPrograms(Programs(Custom, body=lambda base_url: answers.append(post(base_url, body)))) as envs:
        env = envs()
        with pytest.raises(InvalidTurnRequest) as caught:
            env.reset(CHAT, seed=None)
        env.close()
    assert field in str(caught.value)
    assert answers[0]['error']['message'] == str(caught.value)


def test_bodies_of_unknown_chats_are_not_kept() -> None:
    """A body for an unknown chat is skipped, and a malformed length is answered."""
    endpoint = ChatEndpoint()
    unknown = endpoint.base_url.replace('/v1', '/unknown/v1')
    tracemalloc.start()
    try:
        answer = post(unknown, b' ' * (32 << 20))
        # The text of the request is in memory, but no copy of it.
        assert tracemalloc.get_traced_memory()[1] < 48 << 20
        with pytest.raises(HTTPError, match='404'):
            urlopen(Request(f'{unknown}/chat/completions', b'{}', {'Content-Length': 'two'}))
    finally:
        tracemalloc.stop()
        endpoint.close()
    assert 'is not an open chat' in answer['error']['message']


def connections(endpoint: ChatEndpoint, count: int) -> list[socket.socket]:
    """Open connections to an endpoint."""
    port = urlsplit(endpoint.base_url).port
    return [socket.create_connection(('127.0.0.1', port)) for _ in range(count)]


def test_request_over_the_limit_of_connections_is_refused() -> None:
    """A connection over the limit gets an error and a time to retry; after another one is closed, it is served."""
    endpoint = ChatEndpoint(spare_connections=1)
    base_url = endpoint.open_chat().base_url
    held = connections(endpoint, 3)
    refusal = post(base_url, b' ' * (1 << 20))
    assert refusal['error']['message'] == 'more than 3 connections are open; close unused ones, and retry'
    with OpenAI(base_url=base_url, api_key='none', max_retries=0) as client, pytest.raises(APIStatusError) as raised:
        client.chat.completions.create(model='any', messages=CHAT['messages'])
    assert (raised.value.status_code, raised.value.response.headers['retry-after']) == (503, '1')
    held.pop().close()
    # The endpoint notices a closed connection a moment later.
    while (answer := post(base_url, b'{')) == refusal:
        pass
    assert 'the body is not JSON' in answer['error']['message']
    for connection in held:
        connection.close()
    endpoint.close()


def test_connections_far_over_the_limit_are_closed() -> None:
    """An endpoint closes the seventeenth connection over its limit without a response, and serves after the others."""
    endpoint = ChatEndpoint(spare_connections=0)
    held = connections(endpoint, 17)
    assert held[16].recv(1) == b''
    for connection in held:
        connection.close()
    address = endpoint.open_chat().base_url
    while 'connections are open' in (answer := post(address, b'{'))['error']['message']:
        pass
    assert 'the body is not JSON' in answer['error']['message']
    endpoint.close()


def test_response_that_is_not_read_closes_its_connection() -> None:
    """The thread of a connection ends at its deadline, although the client does not read the response."""
    endpoint = ChatEndpoint(timeout=timedelta(seconds=0.5))
    chat, others = endpoint.open_chat(), set(threading.enumerate())
    (connection,) = connections(endpoint, 1)
    body = json.dumps({'messages': CHAT['messages']})
    path = f'{urlsplit(chat.base_url).path}/chat/completions'
    connection.sendall(f'POST {path} HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n{body}'.encode())
    chat.next_event(timedelta(seconds=60))
    (thread,) = set(threading.enumerate()) - others
    chat.reply(Turn(content='a' * (32 << 20)))
    join(thread)
    connection.close()
    endpoint.close()


def test_error_of_a_program_is_raised() -> None:
    """An error that ends the program reaches the rollout unchanged."""

    def fail(base_url: str) -> None:
        raise KeyError(base_url)

    with RunningPrograms(Programs(Custom, body=fail)) as envs, pytest.raises(KeyError):
        envs().reset(CHAT, seed=None)


@pytest.mark.parametrize('fields', [None, {'tools': [TOOL]}])
def test_unusable_programs_are_refused(fields: dict[str, Any] | None) -> None:
    """A program that never asks for a turn is refused, and one with tools if there is no parser."""
    programs = Programs(Custom, body=lambda base_url: None) if fields is None else Programs(fields=fields)
    with RunningPrograms(programs) as envs:
        env = envs()
        with pytest.raises(ProgramFailed):
            env.reset(CHAT, seed=None)
        env.close()


@pytest.mark.parametrize(
    'messages',
    [
        [{'role': 'user', 'content': 'other'}, {'role': 'assistant', 'content': 'a'}, {'role': 'user', 'content': 'x'}],
        [*CHAT['messages'], {'role': 'assistant', 'content': 'a'}],
        [*CHAT['messages'], {'role': 'user', 'content': 'a'}, {'role': 'user', 'content': 'x'}],
    ],
)
def test_only_a_growing_chat_is_continued(messages: Any) -> None:
    """A request that changes earlier messages, or adds none after the model's turn, is refused."""

    def ask(base_url: str) -> None:
        post(base_url, {'messages': CHAT['messages']})
        post(base_url, {'messages': messages})

    with RunningPrograms(Programs(Custom, body=ask)) as envs:
        env = envs()
        env.reset(CHAT, seed=None)
        with pytest.raises(ProgramFailed):
            env.step({'role': 'assistant', 'content': 'a'}, is_last=False)
        env.close()


def test_repeated_request_does_not_continue_the_chat() -> None:
    """A program that sends its request again after the turn gets the turn again, and its chat has one turn."""
    answers: list[Any] = []

    def ask(base_url: str) -> None:
        answers.extend(post(base_url, {'messages': CHAT['messages']}) for _ in range(2))

    with RunningPrograms(Programs(Custom, body=ask)) as envs:
        env = envs()
        env.reset(CHAT, seed=None)
        step = env.step({'role': 'assistant', 'content': 'a'}, is_last=False)
        env.close()
    assert (step.is_done, step.reward) == (True, 1.0)
    assert [answer['choices'][0]['message']['content'] for answer in answers] == ['a', 'a']


def test_a_silent_program_times_out_and_is_cancelled() -> None:
    """The rollout raises TimeoutError, and closing the environment cancels the program."""
    ended: list[BaseException] = []

    class Silent(LetterProgram):
        async def run(self, endpoint: Any, chat: Any) -> Outcome:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError as error:
                ended.append(error)
                raise
            return Outcome(reward=0.0)

    with RunningPrograms(Silent, timeout=timedelta(milliseconds=1)) as envs:
        env = envs()
        with pytest.raises(TimeoutError):
            env.reset(CHAT, seed=None)
        env.close()
    assert len(ended) == 1


def test_closing_refuses_the_waiting_request() -> None:
    """A program that waits for a turn is refused when its environment is closed; its address is then unknown."""
    answers: list[Any] = []
    is_done = threading.Event()

    def ask(base_url: str) -> None:
        answers.extend(post(base_url, {'messages': CHAT['messages']}) for _ in range(2))
        is_done.set()

    with RunningPrograms(Programs(Custom, body=ask)) as envs:
        env = envs()
        env.reset(CHAT, seed=None)
        env.close()
        is_done.wait()
    assert [answer['error']['type'] for answer in answers] == ['invalid_request_error', 'not_found_error']


def test_error_of_the_context_is_raised_at_the_start() -> None:
    """A host whose context cannot be entered raises the error, and stops."""

    @asynccontextmanager
    async def failing():
        raise OSError('no port')
        yield

    with pytest.raises(OSError):  # noqa: PT011 (the error above)
        ProgramHost(failing).open()


def test_interrupt_at_the_start_leaves_the_context() -> None:
    """An interrupt while the context is entered, which another thread receives, closes the host."""
    left: list[bool] = []

    @asynccontextmanager
    async def interrupted():
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        yield
        left.append(True)

    with pytest.raises(KeyboardInterrupt):
        ProgramHost(interrupted).open()
    assert left == [True]
