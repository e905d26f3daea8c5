"""Parsers find exactly the complete tool calls in sampled text."""

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
from twinkle.tool_calls import text_without

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
    """A function that builds a template from one of the chat templates, with the byte tokenizer."""
    return lambda name='chatml', **options: tiny_template(tmp_path, name, **options)


def find_calls(parser: Any, text: str, tools: Sequence[Tool] = ()) -> list[tuple[str, dict[str, Any]]]:
    """Return the names and arguments of the calls in `text`."""
    return [(call.name, call.arguments) for call in parser.find(text, tools)]


def hermes(body: str) -> str:
    """Return `body` inside `<tool_call>` tags."""
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
def test_a_tagged_call_is_found(body: str, expected: tuple[str, dict[str, Any]]) -> None:
    """A tagged call is found, even if its arguments contain braces, quotes or the tags themselves."""
    assert find_calls(HERMES, f'so {hermes(body)} and') == [expected]


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
def test_incomplete_and_malformed_tagged_calls_are_ignored(text: str) -> None:
    """Incomplete and malformed calls between tags are not returned."""
    assert find_calls(HERMES, text) == []


def test_a_complete_call_after_an_incomplete_one_is_found() -> None:
    """An incomplete call does not hide the complete call after it."""
    good = hermes('{"name": "f", "arguments": {}}')
    for prefix in ('<tool_call>', '<tool_call>{"name": "', '<tool_call><function=g><parameter=x>', '</tool_call>{"'):
        assert find_calls(HERMES, prefix + good) == [('f', {})]
    tagged = hermes('<function=f>\n</function>')
    for prefix in ('<tool_call>', '<tool_call>{"name": "', '<tool_call><function=g><parameter=x>'):
        assert find_calls(HERMES, prefix + tagged) == [('f', {})]


def test_tagged_values_have_their_declared_types() -> None:
    """Qwen3.5 values are parsed with the types that the tool declares; without a declared type, they are strings."""
    values = {'a': '12', 'b': 'None', 'is_exact': 'True', 'note': '12', 'rest': '[1, "x"]', 'other': '{"z": 1}'}
    lines = ''.join(f'<parameter={name}>\n{value}\n</parameter>\n' for name, value in values.items())
    text = hermes(f'<function=add>\n{lines}</function>')
    assert find_calls(HERMES, text) == [('add', values)]
    typed = {'a': 12, 'b': None, 'is_exact': True, 'note': '12', 'rest': [1, 'x'], 'other': '{"z": 1}'}
    assert find_calls(HERMES, text, [ADD]) == [('add', typed)]


def test_a_value_of_the_wrong_type_stays_a_string() -> None:
    """A value that does not have its declared type stays a string, and a value may have several lines."""
    text = hermes('<function=add><parameter=a>a few</parameter><parameter=note>\nx\n\ny\n</parameter></function>')
    assert find_calls(HERMES, text, [ADD]) == [('add', {'a': 'a few', 'note': 'x\n\ny'})]


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
def test_json_calls_are_found(text: str) -> None:
    """JSON calls are found with or without a code fence, a marker or preceding prose."""
    assert find_calls(JSON, text) == [('f', {'x': 1})]


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
def test_other_json_is_not_a_call(text: str) -> None:
    """JSON answers and incomplete lists of calls are not calls."""
    assert find_calls(JSON, text) == []


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
def test_react_calls_are_found(text: str, expected: list[Any]) -> None:
    """An input that begins with `{` must be a JSON object; any other input is text up to the next keyword."""
    assert find_calls(REACT, text) == expected


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
def test_generated_calls_are_found_again(calls: list[tuple[str, dict[str, Any]]], prose: str) -> None:
    """Every written call is found with its arguments; without the calls, the other text remains, stripped."""
    bodies = [json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False) for name, arguments in calls]
    text = prose + prose.join(hermes(body) for body in bodies) + prose
    assert find_calls(HERMES, text) == calls
    remaining = text_without(text, HERMES.find(text, ()))
    assert remaining == ((prose * (len(calls) + 1)).strip() if calls else text)
    assert find_calls(JSON, '\n'.join(bodies)) == calls


TAGS = ['<tool_call>', '</tool_call>', '<function=f>', '</function>', '<parameter=x>', '</parameter>', '```']
MARKS = ['{', '}', '[', ']', '"', '\\', '"name"', ':', ',', '"f"', '"arguments"']
PIECES = [*TAGS, *MARKS, '\n', 'Action: f\n', 'Action Input: ', 'é']


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=3)).map(''.join))
def test_any_text_is_accepted(text: str) -> None:
    """Parsers raise no error; their calls are ordered, inside the text and valid JSON."""
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
def test_large_hostile_text_is_parsed(unit: str) -> None:
    """Large texts that take quadratic time in naive parsers give at most one call."""
    for parser in (HERMES, JSON, REACT):
        for end in ('', '</tool_call>', '</function></tool_call>'):
            assert len(find_calls(parser, unit * (100_000 // len(unit)) + end)) <= 1


def test_a_template_finds_and_removes_calls(build: Build) -> None:
    """`parse_tool_call` returns the calls and `clean_tool_call` returns the remaining text."""
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


def test_parsed_calls_render_to_the_same_turn(build: Build) -> None:
    """A sampled turn that was parsed into a message renders to the same text."""
    template = build('tagged')
    text = hermes('<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=note>\nx\n</parameter>\n</function>')
    turn = {'role': 'assistant', 'content': 'So', 'tool_calls': template.parse_tool_call(f'</think>So\n{text}', [ADD])}
    rendered = template.render({'messages': [{'role': 'user', 'content': 'q'}, turn], 'tools': [ADD]})
    assert rendered.endswith(f'So{text}<|im_end|>\n')


def test_calls_inside_the_thought_are_ignored(build: Build) -> None:
    """Calls inside the model's thought are not returned, and are not removed from the text."""
    call = hermes('{"name": "f"}')
    template = build('thinking')
    assert template.parse_tool_call(f'<think>\n{call}\n</think>\n\nno') == []
    assert template.parse_tool_call(f'<think>\n{call}') == []
    assert len(template.parse_tool_call(f'<think>\n{call}\n</think>\n{call}')) == 1
    thought = f'<think>\n{call}\n</think>\n'
    assert template.clean_tool_call(thought + call) == thought.strip()


def test_calls_inside_a_thought_opened_by_the_prompt_are_ignored(build: Build) -> None:
    """If the generation prompt opens the thought, the text up to the closing tag is the thought."""
    call = hermes('{"name": "f"}')
    template = build('tagged')
    assert template.opens_thought
    assert template.parse_tool_call(f'{call}\n</think>\n\nno') == []
    assert template.parse_tool_call(f'hm\n{call}') == []
    assert template.clean_tool_call(f'hm\n{call}') == f'hm\n{call}'
    assert len(template.parse_tool_call(f'hm\n</think>\n\n{call}')) == 1


def test_the_parser_is_chosen_by_chat_template_or_option(build: Build) -> None:
    """The chat template or the class determines the parser, and an option overrides it; unknown parsers are refused."""
    assert build('tagged').tool_call_parser.name == 'hermes'
    assert build('chatml').tool_call_parser.name == 'json'
    assert build('chatml', kind=Qwen3_5Template).tool_call_parser.name == 'hermes'
    assert build('tagged', tool_call_parser='react').tool_call_parser.name == 'react'
    with pytest.raises(UnknownToolCallParser):
        build('chatml', tool_call_parser='smoke')


class _UppercaseParser:
    """Parser that reads a text in capital letters as a call to the tool with that name."""

    name = 'uppercase'

    def find(self, text: str, tools: Sequence[Tool]) -> list[FoundCall]:
        """Return one call that covers the whole text if it is in capital letters."""
        return [FoundCall(0, len(text), text, {})] if text.isupper() else []


def test_a_custom_parser_can_be_used_and_registered(build: Build) -> None:
    """A parser instance can be passed as an option or registered once under its name."""
    template = build('chatml', tool_call_parser=_UppercaseParser())
    assert [call['function']['name'] for call in template.parse_tool_call('ADD')] == ['ADD']
    registry = ToolCallRegistry(_UppercaseParser())
    assert registry.names() == ('uppercase',)
    assert registry.parser('uppercase').name == 'uppercase'
    with pytest.raises(ValueError, match='uppercase'):
        registry.register(_UppercaseParser())
