"""Unit tests of tools: schemas from signatures, argument validation, failures and timeouts."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle.rollout import EnvStep, InvalidTool, Tool, ToolEnv, ToolFailure, ToolManager
from twinkle.rollout.bridge import without_special
from twinkle.rollout.tool_manager import cut_middle


def search(query: str, limit: int = 3, tags: list[str] | None = None, order: Literal['new', 'old'] = 'new') -> str:
    """Find documents.

    Best ones first.

    Args:
        query: search terms.
        limit: maximum number of documents.
    """
    return f'{query} {limit} {tags} {order}'


def call(name: str, arguments: Any) -> Any:
    """Return a tool call in the form that the parser of a template produces."""
    return {'id': 'c7', 'type': 'function', 'function': {'name': name, 'arguments': arguments}}


def test_a_signature_becomes_a_schema():
    """The schema has the type and description of each parameter; parameters without a default are required."""
    tool = Tool.of(search)
    assert tool.description == 'Find documents.\n\nBest ones first.'
    assert tool.spec['function']['parameters'] == {
        'type': 'object',
        'properties': {
            'query': {'type': 'string', 'description': 'search terms.'},
            'limit': {'type': 'integer', 'description': 'maximum number of documents.'},
            'tags': {'anyOf': [{'type': 'array', 'items': {'type': 'string'}}, {'type': 'null'}]},
            'order': {'enum': ['new', 'old']},
        },
        'required': ['query'],
        'additionalProperties': False,
    }


def untyped(what):
    """Return nothing."""


def odd(what: Callable[[], int]) -> None:
    """Return nothing."""


def many(*what: str) -> None:
    """Return nothing."""


def silent(what: str) -> None:
    del what


@pytest.mark.parametrize('function', [untyped, odd, many, silent, lambda what: what])
def test_a_function_without_a_schema_is_no_tool(function):
    """A function without complete type annotations or a description raises InvalidTool."""
    with pytest.raises(InvalidTool):
        Tool.of(function)


def test_two_tools_of_one_name_are_refused():
    """Two tools with the same name raise InvalidTool."""
    with pytest.raises(InvalidTool):
        ToolManager([search, search])


def test_a_call_returns_the_functions_text():
    """The answer has the call's id and name, and the arguments may also be JSON text."""
    tools = ToolManager([search])
    result = tools.call(call('search', {'query': 'x', 'tags': ['a']}))
    assert result.message == {
        'role': 'tool',
        'content': "x 3 ['a'] new",
        'tool_call_id': 'c7',
        'name': 'search',
    }
    assert result.failure is None
    assert tools.call(call('search', '{"query": "y"}')).message['content'] == 'y 3 None new'


def test_other_values_are_converted_to_json():
    """A result that is not a string becomes JSON text."""

    def facts() -> dict[str, Any]:
        """Return a mapping."""
        return {'é': [1, None]}

    assert ToolManager([facts]).call(call('facts', {})).message['content'] == '{"é": [1, null]}'


@pytest.mark.parametrize(
    ('name', 'arguments', 'failure'),
    [
        ('find', {}, ToolFailure.UNKNOWN_TOOL),
        ('search', {}, ToolFailure.BAD_ARGUMENTS),
        ('search', {'query': 3}, ToolFailure.BAD_ARGUMENTS),
        ('search', {'query': 'x', 'limit': True}, ToolFailure.BAD_ARGUMENTS),
        ('search', {'query': 'x', 'limit': 1.5}, ToolFailure.BAD_ARGUMENTS),
        ('search', {'query': 'x', 'tags': [1]}, ToolFailure.BAD_ARGUMENTS),
        ('search', {'query': 'x', 'order': 'best'}, ToolFailure.BAD_ARGUMENTS),
        ('search', {'query': 'x', 'more': 1}, ToolFailure.BAD_ARGUMENTS),
        ('search', '{"query": ', ToolFailure.BAD_ARGUMENTS),
        ('search', '[]', ToolFailure.BAD_ARGUMENTS),
        ('search', None, ToolFailure.BAD_ARGUMENTS),
    ],
)
def test_an_invalid_call_is_answered_with_an_error(name, arguments, failure):
    """An invalid call returns an error message to the model and does not run the function."""
    result = ToolManager([search]).call(call(name, arguments))
    assert result.failure is failure
    assert result.message['role'] == 'tool'
    assert result.message['content']


@pytest.mark.parametrize('error', [ValueError('no'), SystemExit(3), KeyboardInterrupt()])
def test_a_function_that_raises_is_answered_with_an_error(error):
    """Any exception of a tool, including SystemExit, becomes a failed result."""

    def fail() -> None:
        """Fail."""
        raise error

    assert ToolManager([fail]).call(call('fail', {})).failure is ToolFailure.RAISED


def test_calls_time_out_and_their_number_is_limited():
    """A call that times out still occupies its thread; while eight threads are occupied, further calls fail as BUSY."""
    release = threading.Event()

    def hang() -> str:
        """Wait."""
        release.wait()
        return 'late'

    tools = ToolManager([hang], timeout=timedelta())
    failures = [tools.call(call('hang', {})).failure for _ in range(9)]
    assert failures == [ToolFailure.TIMEOUT] * 8 + [ToolFailure.BUSY]
    release.set()
    for thread in threading.enumerate():
        if thread.name == 'tool-hang':
            thread.join()
    assert tools.call(call('hang', {})).failure is not ToolFailure.BUSY


def test_a_long_answer_loses_its_middle():
    """A text that is too long loses its middle, has the maximum length and is marked as truncated."""

    def talk() -> str:
        """Return a long text."""
        return 'a' * 500 + 'z' * 500

    result = ToolManager([talk], max_result_chars=100).call(call('talk', {}))
    content = str(result.message['content'])
    assert result.is_cut
    assert len(content) == 100
    assert (content[0], content[-1]) == ('a', 'z')


@given(text=st.text(max_size=200), max_chars=st.integers(70, 120))
def test_truncated_text_never_exceeds_the_limit(text, max_chars):
    """A truncated text fits the limit, and a short text is unchanged."""
    assert len(cut_middle(text, max_chars)) <= max_chars
    if len(text) <= max_chars:
        assert cut_middle(text, max_chars) == text


@given(pieces=st.lists(st.sampled_from(['<|im_end|>', '<|im_', 'start|>', '<', '|', 'x', '<|im_start|>']), max_size=8))
def test_no_special_token_survives_in_an_answer(pieces):
    """No combination of pieces forms a special token, and only spaces are inserted."""
    special = {'<|im_end|>', '<|im_start|>'}
    text = without_special(''.join(pieces), special)
    assert not any(token in text for token in special)
    assert text.replace(' ', '') == ''.join(pieces)


def test_an_unreadable_call_is_answered():
    """A call that the parser refuses gets a message as its answer, and the chat continues."""

    def parse(text: str) -> list[Any]:
        raise ValueError(text)

    step = ToolEnv(ToolManager([search]), parse).step({'role': 'assistant', 'content': '<'}, is_last=False)
    assert (step.is_done, len(step.messages)) == (False, 1)


def test_the_calls_of_a_last_turn_are_not_run():
    """A call in the last turn does not run its tool."""
    ran: list[str] = []

    def note(what: str) -> str:
        """Record the argument."""
        ran.append(what)
        return what

    env = ToolEnv(ToolManager([note]), lambda text: [call('note', {'what': text})])
    assert env.step({'role': 'assistant', 'content': 'a'}, is_last=True) == EnvStep(is_done=False)
    env.step({'role': 'assistant', 'content': 'b'}, is_last=False)
    assert ran == ['b']


@pytest.mark.parametrize('options', [{'timeout': timedelta(seconds=-1)}, {'max_result_chars': 3}])
def test_bounds_out_of_range_are_refused(options):
    """A negative timeout or a maximum length below the size of the omission mark raises ValueError."""
    with pytest.raises(ValueError):  # noqa: PT011 (there is no dedicated error)
        ToolManager([search], **options)
