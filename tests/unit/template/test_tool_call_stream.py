"""A streamed text gives the same text and tool calls as the complete text."""

import random
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle.tool_calls import FoundCall, HermesQwenParser, JsonParser, StreamedParser, ToolCallStream

HERMES, JSON = HermesQwenParser(), JsonParser()
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TAGGED = '<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>'
FRAGMENTS = (
    CALL, TAGGED, '<tool_call>', '</tool_call>', '<tool_call>\n{', '{"name": "add", "arguments": {}}', '"', '}', ']',
    '{"name": "other", "arguments": {"a": "</tool_call>"}}', '```json\n', '```', '\n', ' ', 'text', '<', '</think>',
    '<think>', '{"answer": 1}', '<function=add>', '</function>', '[{"name": "add", "parameters": {"a": [1]}}]', '\\',
    '[',
)  # fmt: skip


def parts_of(
    pieces: Iterable[str], parser: StreamedParser = HERMES, *, is_thought_open: bool = False
) -> list[str | FoundCall]:
    """Return the parts of a turn that arrives in pieces; adjacent texts are joined."""
    stream = ToolCallStream(parser, tools=(), names={'add'}, is_thought_open=is_thought_open)
    parts = [part for piece in pieces for part in stream.feed(piece)] + stream.feed('', is_last=True)
    joined: list[str | FoundCall] = []
    for part in parts:
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        else:
            joined.append(part)
    return joined


def shown(parts: Iterable[str | FoundCall]) -> list[object]:
    """Return texts, and calls as tuples without their positions."""
    return [part if isinstance(part, str) else (part.name, part.arguments) for part in parts]


@pytest.mark.parametrize('parser', [HERMES, JSON], ids=['hermes', 'json'])
@given(fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=8), seed=st.integers(0, 1000))
def test_pieces_of_any_size_give_the_same_parts(parser: StreamedParser, fragments: list[str], seed: int) -> None:
    """Texts and calls do not depend on the boundaries of the pieces."""
    text = ''.join(fragments)
    generator = random.Random(seed)
    is_open = generator.random() < 0.3
    cuts = sorted(generator.randrange(len(text) + 1) for _ in range(generator.randrange(12)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = shown(parts_of([text], parser, is_thought_open=is_open))
    assert shown(parts_of(pieces, parser, is_thought_open=is_open)) == whole
    assert shown(parts_of(text, parser, is_thought_open=is_open)) == whole


@pytest.mark.parametrize('parser', [HERMES, JSON], ids=['hermes', 'json'])
@given(fragments=st.lists(st.sampled_from(FRAGMENTS[2:]), max_size=8))
def test_text_without_calls_is_unchanged(parser: StreamedParser, fragments: list[str]) -> None:
    """Text without a call to a known tool is returned unchanged, character by character."""
    text = ''.join(fragments)
    parts = parts_of(text, parser)
    if all(isinstance(part, str) for part in parts):
        assert ''.join(map(str, parts)) == text


@pytest.mark.parametrize(
    ('text', 'parser'), [(CALL, HERMES), (TAGGED, HERMES), ('{"name": "add", "arguments": {"a": 1}}', JSON)]
)
def test_calls_are_final_at_their_last_character(text: str, parser: StreamedParser) -> None:
    """A call is returned at its last character, and the spaces around calls are dropped."""
    stream = ToolCallStream(parser, tools=(), names={'add'})
    assert stream.feed('Look:\n\n') == ['Look:']
    assert [part for character in text[:-1] for part in stream.feed(character)] == []
    (call,) = stream.feed(text[-1])
    assert isinstance(call, FoundCall)
    assert call.name == 'add'
    assert stream.feed('\n') + stream.feed(' ', is_last=True) == []


def test_whitespace_between_a_call_and_text_is_kept() -> None:
    """Whitespace between a call and later text is kept if there is text before the call."""
    assert shown(parts_of([f'One.\n{CALL}\nTwo. '])) == ['One.', ('add', {'a': 1}), '\nTwo. ']
    assert shown(parts_of([f'{CALL}\n{CALL}\nTwo.'])) == [('add', {'a': 1}), ('add', {'a': 1}), 'Two.']


def test_text_that_looks_like_a_call_is_released_early() -> None:
    """Text is released as soon as it cannot become a call, and not only at the end of the turn."""
    stream = ToolCallStream(HERMES, tools=(), names={'add'})
    assert stream.feed('a <tool') == ['a']
    assert stream.feed('box> and') == [' <toolbox> and']
    assert stream.feed('<tool_call>{"name": x') == ['<tool_call>{"name": x']
    plain = ToolCallStream(JSON, tools=(), names={'add'})
    assert plain.feed('{"answer": ') == ['{"answer":']
    assert plain.feed('[1](link) {') == [' [1](link)']


def test_calls_in_the_thought_are_text() -> None:
    """A call inside the thought is text, whether the turn or its prompt opens the thought; a later call counts."""
    for beginning, is_open in (('<think>', False), ('\n<think>', False), ('', True)):
        text = f'{beginning}{CALL}</think>\n{CALL}'
        parts = parts_of(text, is_thought_open=is_open)
        assert parts[0] == f'{beginning}{CALL}</think>'
        assert shown(parts[1:]) == [('add', {'a': 1})]
    assert parts_of(CALL, is_thought_open=True) == [CALL]


def test_calls_of_unknown_tools_are_text() -> None:
    """A call to a tool that was not offered stays in the text."""
    other = CALL.replace('add', 'other')
    assert shown(parts_of(f'{other}\n{CALL}')) == [other, ('add', {'a': 1})]


@pytest.mark.parametrize('fragment', ['<tool_call>{a: </tool_call>', '{name: ', '[{', '<tool_call> ', '```json', '{"a'])
def test_hostile_texts_take_linear_time(fragment: str) -> None:
    """A long text that always looks like the beginning of a call is parsed a bounded number of times."""
    read = 0

    class Counting(HermesQwenParser):
        def pending(self, text: str) -> int:
            nonlocal read
            read += len(text)
            return super().pending(text)

    text = '<tool_call>{"a": "' + fragment * 4000
    stream = ToolCallStream(Counting(), tools=(), names={'add'})
    parts = [part for begin in range(0, len(text), 8) for part in stream.feed(text[begin : begin + 8])]
    assert ''.join(map(str, parts + stream.feed('', is_last=True))) == text
    assert read < 600 * len(text)


def test_text_with_many_open_tags_is_searched_once() -> None:
    """One search for the closing tags of many open calls reads the text once."""
    read = 0

    class Counting(str):
        __slots__ = ()

        def find(self, *args: Any) -> int:
            nonlocal read
            found = super().find(*args)
            read += (len(self) if found < 0 else found) - args[1]
            return found

        def rfind(self, *args: Any) -> int:
            nonlocal read
            read += len(self)
            return super().rfind(*args)

    text = Counting('<tool_call><function=' * 1000 + '</tool_call>')
    assert HERMES.pending(text) == len(text)
    assert read <= len(text)
