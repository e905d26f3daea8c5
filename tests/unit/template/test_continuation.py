"""Sampled tokens are appended to a prompt unchanged, and the prompt's fields are extended consistently."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fixtures.tiny_templates import tiny_template
from twinkle.template import InvalidFeature, Qwen3_5Template, Template

CHAT = [{'role': 'user', 'content': 'hi'}, {'role': 'assistant', 'content': 'yes'}, {'role': 'user', 'content': 'so'}]


@pytest.fixture
def template(tmp_path: Path) -> Template:
    """A template with the byte tokenizer."""
    return tiny_template(tmp_path)


def test_a_missing_mask_is_derived_from_the_labels(template: Template) -> None:
    """A prompt with labels but without a completion mask gets the mask that its labels imply."""
    feature = template.encode({'messages': CHAT})
    joined = template.concat_input_feature(feature, [5, 6])
    mask, labels = np.asarray(joined['completion_mask']), np.asarray(joined['labels'])
    np.testing.assert_array_equal(mask[1:], labels[:-1] != -100)
    assert list(mask[-2:]) == [1, 1]


def test_per_token_values_are_extended(template: Template) -> None:
    """Values of earlier turns are kept; new tokens have a loss weight of 1.0 and other values of 0.0."""
    prompt: Any = template.encode({'messages': CHAT}, add_generation_prompt=True)
    count = prompt['length']
    streams = {
        'old_logps': [-1.0] * count,
        'loss_weights': [0.5] * count,
        'teacher_topk_ids': np.ones((count, 3), np.int64),
    }
    joined: Any = template.concat_input_feature({**prompt, **streams}, [5, 6])
    assert list(joined['old_logps']) == [-1.0] * count + [0.0, 0.0]
    assert list(joined['loss_weights']) == [0.5] * (count - 1) + [1.0, 1.0, 1.0]
    assert joined['teacher_topk_ids'].shape == (count + 2, 3)
    assert streams['loss_weights'] == [0.5] * count


@pytest.mark.parametrize('empty', [{}, {'input_ids': []}])
def test_a_completion_without_a_prompt_is_a_feature(template: Template, empty: Any) -> None:
    """An empty prompt is accepted; all new tokens are labelled except the first one, which has no predecessor."""
    joined = template.concat_input_feature(empty, [5, 6])
    assert list(joined['labels']) == [6, -100]
    assert list(joined['completion_mask']) == [1, 1]


def test_an_empty_completion_changes_nothing(template: Template) -> None:
    """An empty completion leaves the tokens and labels unchanged."""
    feature = template.encode({'messages': CHAT})
    joined = template.concat_input_feature(feature, [])
    np.testing.assert_array_equal(joined['labels'], feature['labels'])
    np.testing.assert_array_equal(joined['input_ids'], feature['input_ids'])


@pytest.mark.parametrize(
    ('prompt', 'new', 'field'),
    [
        ({'input_ids': [1, 2]}, [0.5], 'new_tokens'),
        ({'input_ids': [1, 2]}, [-1], 'new_tokens'),
        ({'input_ids': [1, 2]}, [[1]], 'new_tokens'),
        ({'input_ids': [1, 2]}, ['a'], 'new_tokens'),
        ({'input_ids': [1, 2]}, [2**31], 'new_tokens'),
        ({'input_ids': [[1, 2]]}, [1], 'prompt_feature.input_ids'),
        ({'input_ids': [1, 2], 'labels': [2]}, [1], 'prompt_feature.labels'),
        ({'input_ids': [1, 2], 'labels': -100}, [1], 'prompt_feature.labels'),
        ({'input_ids': [1, 2], 'completion_mask': [1, 1, 1]}, [1], 'prompt_feature.completion_mask'),
        ({'input_ids': [1, 2], 'old_logps': [0.0]}, [1], 'prompt_feature.old_logps'),
    ],
)
def test_invalid_arguments_are_refused_by_field(template: Template, prompt: Any, new: Any, field: str) -> None:
    """Invalid token ids, and fields whose shape does not match the prompt, are refused with the path of the field."""
    with pytest.raises(InvalidFeature) as caught:
        template.concat_input_feature(prompt, new)
    assert caught.value.field == field
    assert pickle.loads(pickle.dumps(caught.value)).field == field


def test_a_thought_opened_by_the_prompt_is_parsed(tmp_path: Path) -> None:
    """A Qwen3.5 turn that was sampled without the opening tag renders unchanged from its message."""
    template = tiny_template(tmp_path, 'tagged', kind=Qwen3_5Template)
    question = {'role': 'user', 'content': 'q'}
    prompt = template.render({'messages': [question]}, add_generation_prompt=True)
    sampled = 'so\n</think>\n\nyes'
    turn: Any = template.format_trajectory({'messages': [question, {'role': 'assistant', 'content': sampled}]})
    assert turn['messages'][1] == {'role': 'assistant', 'content': 'yes', 'reasoning_content': 'so'}
    assert template.render(turn) == f'{prompt}{sampled}<|im_end|>\n'


def test_without_thinking_only_the_answer_is_labelled(tmp_path: Path) -> None:
    """A prompt with `enable_thinking=False` ends with an empty thought, and only the answer is labelled."""
    template = tiny_template(tmp_path, 'tagged', kind=Qwen3_5Template, enable_thinking=False)
    assert not template.opens_thought
    feature = template.encode({'messages': CHAT[:2]})
    assert template.decode([int(label) for label in feature['labels'] if label != -100]) == 'yes<|im_end|>'
