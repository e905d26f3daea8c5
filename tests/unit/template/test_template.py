"""Encoding chats: tokens, labels, lengths and errors."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fixtures.chat_templates import ALL
from fixtures.tiny_model import build_tiny_tokenizer
from twinkle.template import (
    ExampleTooLong,
    InvalidTrajectory,
    Qwen3_5Template,
    Template,
    TemplateError,
    UnknownTemplate,
    build_template,
)

Build = Callable[..., Template]

CHAT = [
    {'role': 'user', 'content': 'hi 12 é'},
    {'role': 'assistant', 'content': 'Héllo\n'},
    {'role': 'user', 'content': 'Héllo'},
    {'role': 'assistant', 'content': 'bye'},
]


@pytest.fixture(scope='module')
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """A function that builds a template from one of the chat templates, with the byte tokenizer."""

    def make(name: str = 'chatml', **options: Any) -> Template:
        folder: Path = tmp_path_factory.mktemp('tokenizer')
        build_tiny_tokenizer(folder)
        (folder / 'chat_template.jinja').write_text(ALL[name])
        return Template(str(folder), **options)

    return make


def labelled(template: Template, chat: list[dict[str, Any]], **trajectory: Any) -> str:
    """Return the text of the labelled tokens."""
    feature = template.encode({'messages': chat, **trajectory})
    return template.decode([int(label) for label in feature['labels'] if label != -100])


@pytest.mark.parametrize(
    ('name', 'expected'),
    [
        ('chatml', 'Héllo\n<|im_end|>bye<|im_end|>'),
        ('marked', 'Héllo\n<|im_end|>bye<|im_end|>'),
        ('thinking', 'Héllo\n<|im_end|><think>\n\n</think>\n\nbye<|im_end|>'),
        ('brackets', ' Héllo<|im_end|> bye<|im_end|>'),
    ],
)
def test_labels_cover_the_assistant_turns(build: Build, name: str, expected: str) -> None:
    """Exactly the tokens of the assistant turns and their end tokens are labelled."""
    assert labelled(build(name), CHAT) == expected


def test_labels_are_shifted(build: Build) -> None:
    """The label of a token is the next token."""
    feature = build().encode({'messages': CHAT})
    ids, labels = np.asarray(feature['input_ids']), np.asarray(feature['labels'])
    is_labelled = labels[:-1] != -100
    np.testing.assert_array_equal(labels[:-1][is_labelled], ids[1:][is_labelled])
    assert labels[-1] == -100


def test_features_are_int32_of_equal_length(build: Build) -> None:
    """All arrays of a feature are int32 of its length, and positions count from 0."""
    feature = build().encode({'messages': CHAT})
    for name in ('input_ids', 'labels', 'attention_mask', 'position_ids'):
        array = feature[name]
        assert (array.dtype, array.shape) == (np.int32, (feature['length'],))
    assert list(feature['position_ids'][:3]) == [0, 1, 2]


def test_thinking_of_the_last_turn_is_labelled(build: Build) -> None:
    """`<think>` in the content and `reasoning_content` give the same labels for the last turn."""
    template = build('thinking')
    as_field = [{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': 'b', 'reasoning_content': 'c'}]
    as_tags = [{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': '<think>\nc\n</think>\n\nb'}]
    assert labelled(template, as_field) == labelled(template, as_tags) == '<think>\nc\n</think>\n\nb<|im_end|>'


def test_thinking_moves_into_the_content_if_not_supported(build: Build) -> None:
    """The thinking becomes part of the content for a chat template without thinking."""
    chat = [{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': 'b', 'reasoning_content': 'c'}]
    assert labelled(build('chatml'), chat) == '<think>\nc\n</think>\n\nb<|im_end|>'


def test_tool_calls_are_labelled(build: Build) -> None:
    """A turn that only contains a tool call is labelled; the tool's result is not."""
    call = {'type': 'function', 'function': {'name': 'add', 'arguments': '{"a": 1}'}}
    chat = [
        {'role': 'user', 'content': 'q'},
        {'role': 'assistant', 'content': None, 'tool_calls': [call]},
        {'role': 'tool', 'content': '2'},
        {'role': 'assistant', 'content': 'two'},
    ]
    text = labelled(build('thinking'), chat, tools=[{'type': 'function', 'function': {'name': 'add'}}])
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>' in text
    assert text.endswith('two<|im_end|>')
    assert '2' not in text


@given(st.lists(st.text(st.characters(exclude_categories=['Cs', 'Co'])), min_size=2, max_size=6))
def test_found_turns_equal_marked_turns(byte_templates: tuple[Template, Template], texts: list[str]) -> None:
    """Turns that are found by rendering get the same labels as turns that generation marks delimit."""
    by_rounds, by_marks = byte_templates
    chat = [{'role': ('user', 'assistant')[i % 2], 'content': text} for i, text in enumerate(texts)]
    first, second = by_rounds.encode({'messages': chat}), by_marks.encode({'messages': chat})
    np.testing.assert_array_equal(first['input_ids'], second['input_ids'])
    np.testing.assert_array_equal(first['labels'], second['labels'])


@pytest.fixture(scope='module')
def byte_templates(build: Build) -> tuple[Template, Template]:
    """The same chat format without and with generation marks."""
    return build('chatml'), build('marked')


def test_generation_prompt_has_no_labels(build: Build) -> None:
    """A prompt ends with the opening of an assistant turn and has no labels."""
    template = build()
    feature = template.encode({'messages': CHAT[:1]}, add_generation_prompt=True)
    assert template.decode(feature['input_ids']).endswith('<|im_start|>assistant\n')
    assert 'labels' not in feature


def test_default_system_is_added_if_missing(build: Build) -> None:
    """The default system message is added only to chats that have none."""
    template = build(default_system='S')
    assert template.render({'messages': CHAT}).startswith('<|im_start|>system\nS<|im_end|>')
    own = [{'role': 'system', 'content': 'T'}, *CHAT]
    assert template.render({'messages': own}).startswith('<|im_start|>system\nT<|im_end|>')


def test_thinking_can_be_disabled(build: Build) -> None:
    """The chat template receives `enable_thinking`."""
    text = build('thinking', enable_thinking=False).render({'messages': CHAT[:1]}, add_generation_prompt=True)
    assert text.endswith('<think>\n\n</think>\n\n')


@pytest.mark.parametrize(
    ('strategy', 'lengths', 'ending'), [('left', [9], 'ye<|im_end|>'), ('right', [9], ''), ('delete', [], '')]
)
def test_long_examples_are_truncated_or_removed(build: Build, strategy: str, lengths: list[int], ending: str) -> None:
    """'left' and 'right' keep `max_length` tokens, and 'delete' removes the example."""
    template = build(max_length=9, truncation_strategy=strategy)
    features = template.batch_encode([{'messages': CHAT}])
    assert [feature['length'] for feature in features] == lengths
    text = ''.join(template.decode([int(i) for i in feature['labels'] if i != -100]) for feature in features)
    assert text.endswith(ending)


def test_split_keeps_every_token(build: Build) -> None:
    """The pieces of a split example contain all tokens in order, and each piece's positions begin at 0."""
    whole = build().encode({'messages': CHAT})
    pieces = build(max_length=9, truncation_strategy='split').batch_encode([{'messages': CHAT}])
    np.testing.assert_array_equal(np.concatenate([piece['input_ids'] for piece in pieces]), whole['input_ids'])
    assert {piece['position_ids'][0] for piece in pieces} == {0}
    assert {piece['labels'][-1] for piece in pieces} == {-100}


def test_long_example_is_refused_by_default(build: Build) -> None:
    """Long examples are refused by default, and the end of a prompt is never truncated."""
    with pytest.raises(ExampleTooLong) as caught:
        build(max_length=9).encode({'messages': CHAT})
    assert caught.value.max_length == 9
    with pytest.raises(ExampleTooLong):
        build(max_length=9, truncation_strategy='right').encode({'messages': CHAT}, add_generation_prompt=True)


@pytest.mark.parametrize(
    ('messages', 'field'),
    [
        (None, 'messages'),
        ([], 'messages'),
        ('hello', 'messages'),
        (['hello'], 'messages[0]'),
        ([{'content': 'x'}], 'messages[0].role'),
        ([{'role': 'robot', 'content': 'x'}], 'messages[0].role'),
        ([CHAT[0], {'role': 'system', 'content': 'x'}], 'messages[1].role'),
        ([{'role': 'user'}], 'messages[0].content'),
        ([{'role': 'user', 'content': 7}], 'messages[0].content'),
        ([{'role': 'user', 'content': [{'type': 'image', 'image': 'x'}]}], 'messages[0].content[0]'),
        ([{'role': 'assistant', 'tool_calls': [{}]}], 'messages[0].tool_calls[0].function.name'),
    ],
)
def test_malformed_chat_is_refused_by_field(build: Build, messages: Any, field: str) -> None:
    """The error of a malformed chat names the invalid field."""
    with pytest.raises(InvalidTrajectory) as caught:
        build().encode({'messages': messages})
    assert caught.value.field == field


def test_refusal_of_the_chat_template_is_reported(build: Build) -> None:
    """An error raised by the chat template becomes a TemplateError."""
    with pytest.raises(TemplateError, match='roles must alternate'):
        build('brackets').encode({'messages': [CHAT[0], CHAT[0]]})


def test_check_finds_unusable_chats(build: Build) -> None:
    """`check` reports chats without an assistant turn, malformed chats and chats that are too long."""
    template = build(max_length=60)
    problems = template.batch_check([{'messages': CHAT[:2]}, {'messages': CHAT[:1]}, {}, {'messages': CHAT * 3}])
    assert [problem is None for problem in problems] == [True, False, False, False]


def test_concatenated_completion_is_labelled(build: Build) -> None:
    """Each appended completion is labelled, and earlier completions stay labelled."""
    template = build()
    prompt = template.encode({'messages': CHAT[:1]}, add_generation_prompt=True)
    once = template.concat_input_feature(prompt, [10, 11])
    twice = template.concat_input_feature(once, [12])
    count = prompt['length']
    assert list(twice['input_ids'][count:]) == [10, 11, 12]
    assert list(twice['labels'][count - 1 :]) == [10, 11, 12, -100]
    assert list(twice['completion_mask']) == [0] * count + [1, 1, 1]
    assert 'labels' not in prompt


def test_plain_texts_are_joined_without_a_chat_template(build: Build) -> None:
    """Texts are concatenated with `use_chat_template=False`, and the assistant's texts are labelled."""
    template = build(use_chat_template=False)
    assert template.render({'messages': CHAT[:2]}) == 'hi 12 éHéllo\n'
    assert labelled(template, CHAT[:2]) == 'Héllo\n'


@pytest.mark.parametrize('options', [{'max_length': 0}, {'truncation_strategy': 'middle'}, {'max_len': 3}])
def test_invalid_options_are_refused(build: Build, options: dict[str, Any]) -> None:
    """Unknown options and options out of range raise an error that names the option."""
    with pytest.raises((TypeError, ValueError), match=next(iter(options))):
        build(**options)


def test_templates_are_built_by_name_class_or_instance(build: Build) -> None:
    """`build_template` accepts a registered name, a class and an instance."""
    template = build()
    assert build_template(template) is template
    assert isinstance(build_template('Qwen3_5Template', model_id=template.model_id), Qwen3_5Template)
    assert isinstance(build_template(Qwen3_5Template, model_id=template.model_id), Qwen3_5Template)
    with pytest.raises(UnknownTemplate, match='Qwen3_5Template'):
        build_template('NoTemplate', model_id=template.model_id)


def test_errors_survive_pickling() -> None:
    """Pickled errors keep their attributes."""
    too_long = pickle.loads(pickle.dumps(ExampleTooLong(10, 9)))
    invalid = pickle.loads(pickle.dumps(InvalidTrajectory('messages[0]', 'is wrong')))
    assert (too_long.token_count, invalid.field) == (10, 'messages[0]')
