"""Calls of tools are found in what a model says: whole ones only, whatever stands around them."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fixtures.tiny_templates import tiny_template
from twinkle.data_format import Tool
from twinkle.template import (
    TOOL_CALL_PARSERS,
    FoundCall,
    Qwen3_5Template,
    Template,
    ToolCallRegistry,
    UnknownToolCallParser,
)
from twinkle.template.tool_calls import text_without

Build = Callable[..., Template]

HERMES, JSON, REACT = (TOOL_CALL_PARSERS.parser(name) for name in ('hermes', 'json', 'react'))
ADD: Tool = {
    'type': 'function',
    'function': {
        'name': 'add',
        'parameters': {
            'type': 'object',
            'properties': {
                'a': {'type': 'integer'},
                'b': {'type': ['number', 'null']},
                'is_exact': {'type': 'boolean'},
                'note': {'type': 'string'},
                'rest': {'type': 'array'},
            },
        },
    },
}


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Build a template over the byte tokenizer with one of the chat templates."""
    return lambda name='chatml', **options: tiny_template(tmp_path, name, **options)


def found(parser: Any, text: str, tools: Sequence[Tool] = ()) -> list[tuple[str, dict[str, Any]]]:
    """Return the names and arguments of the calls in `text`."""
    return [(call.name, call.arguments) for call in parser.find(text, tools)]


def hermes(body: str) -> str:
    """Return a body between the tags of a call."""
    return f'<tool_call>\n{body}\n</tool_call>'


@pytest.mark.parametrize(
    ('body', 'expected'),
    [
        ('{"name": "f", "arguments": {"x": {"y": [{}, "}"]}}}', ('f', {'x': {'y': [{}, '}']}})),
        ('{"name": "f"}', ('f', {})),
        ('{"name": "f", "arguments": "{\\"x\\": 1}"}', ('f', {'x': 1})),
        ('{"name": "f", "parameters": {"x": "é \\u00e9 \\ud83d\\ude42"}}', ('f', {'x': 'é é 🙂'})),
        ('{"name": "f", "arguments": {"x": "</tool_call><tool_call>{"}}', ('f', {'x': '</tool_call><tool_call>{'})),
    ],
)
def test_a_call_in_tags_is_read(body: str, expected: tuple[str, dict[str, Any]]) -> None:
    """Braces, quotes and the tags themselves may be inside the arguments."""
    assert found(HERMES, f'so {hermes(body)} and') == [expected]


@pytest.mark.parametrize(
    'text',
    [
        '<tool_call>',
        '<tool_call>{"name": "f", "arguments": {}}',
        '<tool_call>{"name": "f", "arguments": {"x": "</tool_call>',
        '<tool_call>{"name": "f", "arguments": {}</tool_call>',
        '{"name": "f", "arguments": {}}</tool_call>',
        hermes('{"name": "", "arguments": {}}'),
        hermes('{"name": 7, "arguments": {}}'),
        hermes('{"name": "f", "arguments": [1]}'),
        hermes('{"name": "f", "arguments": "x"}'),
        hermes('{"name": "f", "arguments": {"x": NaN}}'),
        hermes('{"name": "f", "arguments": {"x": 1e999}}'),
        hermes('{"name": "f", "arguments": {"x": "\\ud800"}}'),
        hermes('{"name": "f", "arguments": {"x": ' + '[' * 5000 + ']' * 5000 + '}}'),
        hermes('{"name": "f", "arguments": {"x": ' + '1' * 5000 + '}}'),
        hermes('{"name": "f", "arguments": {}} and more'),
        hermes('["f"]'),
        hermes('<function=f><parameter=x>1</function>'),
        hermes('<function=f>x</function>'),
        hermes('<function=f>'),
        hermes('<function=>\n</function>'),
    ],
)
def test_half_and_malformed_calls_in_tags_are_none(text: str) -> None:
    """What is not a whole call is left alone."""
    assert found(HERMES, text) == []


def test_a_whole_call_behind_a_half_one_is_found() -> None:
    """A model that begins again is understood."""
    good = hermes('{"name": "f", "arguments": {}}')
    for half in ('<tool_call>', '<tool_call>{"name": "', '<tool_call><function=g><parameter=x>', '</tool_call>{"'):
        assert found(HERMES, half + good) == [('f', {})]
    tagged = hermes('<function=f>\n</function>')
    for half in ('<tool_call>', '<tool_call>{"name": "', '<tool_call><function=g><parameter=x>'):
        assert found(HERMES, half + tagged) == [('f', {})]


def test_values_in_tags_have_the_types_that_the_tool_declares() -> None:
    """Qwen3.5 writes values without quotes: text stays text, all else is read as what it is declared to be."""
    values = {'a': '12', 'b': 'None', 'is_exact': 'True', 'note': '12', 'rest': '[1, "x"]', 'other': '{"z": 1}'}
    lines = ''.join(f'<parameter={name}>\n{value}\n</parameter>\n' for name, value in values.items())
    text = hermes(f'<function=add>\n{lines}</function>')
    assert found(HERMES, text) == [('add', values)]
    typed = {'a': 12, 'b': None, 'is_exact': True, 'note': '12', 'rest': [1, 'x'], 'other': '{"z": 1}'}
    assert found(HERMES, text, [ADD]) == [('add', typed)]


def test_a_value_of_another_type_than_declared_stays_text() -> None:
    """The tool refuses it then, and can say why; several lines are one value."""
    text = hermes('<function=add><parameter=a>a few</parameter><parameter=note>\nx\n\ny\n</parameter></function>')
    assert found(HERMES, text, [ADD]) == [('add', {'a': 'a few', 'note': 'x\n\ny'})]


@pytest.mark.parametrize(
    'text',
    [
        '{"name": "f", "arguments": {"x": 1}}',
        'Now:\n{"name": "f", "parameters": {"x": 1}}\n',
        '```json\n{"name": "f", "arguments": {"x": 1}}\n```',
        '<|python_tag|>{"name": "f", "parameters": {"x": 1}}',
        '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}]',
        '{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\\"x\\": 1}"}}',
        'in {sets} [1] of "quotes {"name": "f", "arguments": {"x": 1}}',
    ],
)
def test_bare_json_calls_are_read(text: str) -> None:
    """With or without a fence, a mark or prose in front of it."""
    assert found(JSON, text) == [('f', {'x': 1})]


@pytest.mark.parametrize(
    'text',
    [
        '{"name": "Ann", "age": 3}',
        '{"name": "Ann"}',
        '{"name": "f", "arguments": {}, "why": "so"}',
        '[{"name": "f", "arguments": {}}, 1]',
        '[{"name": "f", "arguments": {}}',
        '{"name": "f", "arguments": {"x": "',
        '[' * 5000,
        '',
    ],
)
def test_other_json_is_no_call(text: str) -> None:
    """An answer in JSON is an answer, and half a list of calls is none."""
    assert found(JSON, text) == []


@pytest.mark.parametrize(
    ('text', 'expected'),
    [
        ('Thought: t\nAction: f\nAction Input: {"x": {"y": 1}}\nObservation:', [('f', {'x': {'y': 1}})]),
        ('Action: f\nAction Input: {\n  "x": 1\n}', [('f', {'x': 1})]),
        (
            'Action: find\nAction Input: grey cats\nand dogs\nObservation: none',
            [('find', {'input': 'grey cats\nand dogs'})],
        ),
        ('Action: f\nAction Input: {"x":\nAction: g\nAction Input: {}', [('g', {})]),
        ('Action: f\nAction Input: a\nAction: g\nAction Input: b', [('f', {'input': 'a'}), ('g', {'input': 'b'})]),
        ('Action: f\nFinal Answer: x', []),
        ('the Action: f\nAction Input: x', []),
        ('Action: \nAction Input: {}', []),
    ],
)
def test_calls_as_lines_are_read(text: str, expected: list[Any]) -> None:
    """An input that begins an object must be one; any other is text up to the format's next word."""
    assert found(REACT, text) == expected


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(exclude_categories=['Cs'])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
CALLS = st.lists(
    st.tuples(st.sampled_from(['f', 'g.h', 'é']), st.dictionaries(st.text(max_size=4), VALUES, max_size=3))
)
PROSE = st.text(st.characters(exclude_characters='<{[', exclude_categories=['Cs']), max_size=9)


@given(calls=CALLS, prose=PROSE)
def test_written_calls_are_read_again(calls: list[tuple[str, dict[str, Any]]], prose: str) -> None:
    """Every call that can be written is found with its arguments, and nothing else is taken from the text."""
    bodies = [json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False) for name, arguments in calls]
    text = prose + prose.join(hermes(body) for body in bodies) + prose
    assert found(HERMES, text) == calls
    said = text_without(text, HERMES.find(text, ()))
    assert said == ((prose * (len(calls) + 1)).strip() if calls else text)
    assert found(JSON, '\n'.join(bodies)) == calls


TAGS = ['<tool_call>', '</tool_call>', '<function=f>', '</function>', '<parameter=x>', '</parameter>', '```']
MARKS = ['{', '}', '[', ']', '"', '\\', '"name"', ':', ',', '"f"', '"arguments"']
PIECES = [*TAGS, *MARKS, '\n', 'Action: f\n', 'Action Input: ', 'é']


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=3)).map(''.join))
def test_any_text_is_taken(text: str) -> None:
    """Nothing that a model says raises; calls are in order, within the text and can be written again."""
    for parser in (HERMES, JSON, REACT):
        end = 0
        for call in parser.find(text, (ADD,)):
            assert end <= call.begin <= call.end <= len(text)
            assert json.loads(json.dumps(call.arguments)) == call.arguments
            end = call.end


@pytest.mark.parametrize(
    'unit',
    [
        '<tool_call>',
        '<tool_call>{"',
        '<tool_call>["',
        '<tool_call><function=f><parameter=x>',
        '{',
        '[',
        '{"a":',
        'Action: a\nAction Input: {\n',
        '<parameter=b><tool_call><function=a><parameter=c></parameter>',
        '{"',
        '<tool_call>{}',
        ' ',
        '"',
    ],
)
def test_huge_hostile_text_is_read(unit: str) -> None:
    """Text that makes a careless parser begin again and again is read in time, and makes at most one call."""
    for parser in (HERMES, JSON, REACT):
        for end in ('', '</tool_call>', '</function></tool_call>'):
            assert len(found(parser, unit * (100_000 // len(unit)) + end)) <= 1


def test_a_template_reads_and_removes_calls(build: Build) -> None:
    """Calls come as messages hold them, and what is left is what was said."""
    template = build('thinking')
    text = 'Sure.\n' + hermes('{"name": "f", "arguments": {"x": 1}}') + '\n' + hermes('{"name": "g"}')
    calls = template.parse_tool_call(text)
    assert [call['function'] for call in calls] == [
        {'name': 'f', 'arguments': {'x': 1}},
        {'name': 'g', 'arguments': {}},
    ]
    assert len({call['id'] for call in calls}) == 2
    assert template.clean_tool_call(text) == 'Sure.'
    assert template.parse_tool_call(' no call ') == []
    assert template.clean_tool_call(' no call ') == ' no call '


def test_read_calls_can_be_encoded_again(build: Build) -> None:
    """A sampled turn, taken apart into a message, renders to the same turn."""
    template = build('tagged')
    text = hermes('<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=note>\nx\n</parameter>\n</function>')
    turn = {'role': 'assistant', 'content': 'So', 'tool_calls': template.parse_tool_call(f'</think>So\n{text}', [ADD])}
    rendered = template.render({'messages': [{'role': 'user', 'content': 'q'}, turn], 'tools': [ADD]})
    assert rendered.endswith(f'So{text}<|im_end|>\n')


def test_calls_within_the_thought_are_none(build: Build) -> None:
    """A model may think about a call without making it."""
    call = hermes('{"name": "f"}')
    template = build('thinking')
    assert template.parse_tool_call(f'<think>\n{call}\n</think>\n\nno') == []
    assert template.parse_tool_call(f'<think>\n{call}') == []
    assert len(template.parse_tool_call(f'<think>\n{call}\n</think>\n{call}')) == 1
    said = f'<think>\n{call}\n</think>\n'
    assert template.clean_tool_call(said + call) == said.strip()


def test_a_thought_that_the_prompt_opened_is_minded(build: Build) -> None:
    """Where the generation prompt opens the thought, a closing tag alone ends it."""
    call = hermes('{"name": "f"}')
    template = build('tagged')
    assert template.opens_thought
    assert template.parse_tool_call(f'{call}\n</think>\n\nno') == []
    assert template.parse_tool_call(f'hm\n{call}') == []
    assert template.clean_tool_call(f'hm\n{call}') == f'hm\n{call}'
    assert len(template.parse_tool_call(f'hm\n</think>\n\n{call}')) == 1


def test_the_style_is_chosen_by_the_chat_template_or_by_name(build: Build) -> None:
    """The model's own format says what its calls look like; an option wins."""
    assert build('tagged').tool_call_parser.name == 'hermes'
    assert build('chatml').tool_call_parser.name == 'json'
    assert build('chatml', kind=Qwen3_5Template).tool_call_parser.name == 'hermes'
    assert build('tagged', tool_call_parser='react').tool_call_parser.name == 'react'
    with pytest.raises(UnknownToolCallParser):
        build('chatml', tool_call_parser='smoke')


class _ShoutParser:
    """Calls the tool whose name is shouted."""

    name = 'shout'

    def find(self, text: str, tools: Sequence[Tool]) -> list[FoundCall]:
        """Return one call of the whole text, in capitals."""
        return [FoundCall(0, len(text), text, {})] if text.isupper() else []


def test_a_parser_of_ones_own_can_be_used_and_registered(build: Build) -> None:
    """An instance is taken as it is; a registry knows it by its name, once."""
    template = build('chatml', tool_call_parser=_ShoutParser())
    assert [call['function']['name'] for call in template.parse_tool_call('ADD')] == ['ADD']
    registry = ToolCallRegistry(_ShoutParser())
    assert registry.names() == ('shout',)
    assert registry.parser('shout').name == 'shout'
    with pytest.raises(ValueError, match='shout'):
        registry.register(_ShoutParser())
