"""Sampled tokens go behind a prompt as they are, with everything a prompt already says kept in step."""

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
    """A template over the byte tokenizer."""
    return tiny_template(tmp_path)


def test_labels_without_a_mask_go_on_counting(template: Template) -> None:
    """An example that was encoded for training keeps its labels in force behind the new mask."""
    feature = template.encode({'messages': CHAT})
    joined = template.concat_input_feature(feature, [5, 6])
    mask, labels = np.asarray(joined['completion_mask']), np.asarray(joined['labels'])
    np.testing.assert_array_equal(mask[1:], labels[:-1] != -100)
    assert list(mask[-2:]) == [1, 1]


def test_numbers_beside_the_labels_stay_in_step(template: Template) -> None:
    """What earlier turns have is kept; the new tokens' is 0 until it is set, and their weight 1."""
    prompt: Any = template.encode({'messages': CHAT}, add_generation_prompt=True)
    count = prompt['length']
    given = {
        'old_logps': [-1.0] * count,
        'loss_weights': [0.5] * count,
        'teacher_topk_ids': np.ones((count, 3), np.int64),
    }
    joined: Any = template.concat_input_feature({**prompt, **given}, [5, 6])
    assert list(joined['old_logps']) == [-1.0] * count + [0.0, 0.0]
    assert list(joined['loss_weights']) == [0.5] * (count - 1) + [1.0, 1.0, 1.0]
    assert joined['teacher_topk_ids'].shape == (count + 2, 3)
    assert given['loss_weights'] == [0.5] * count


@pytest.mark.parametrize('empty', [{}, {'input_ids': []}])
def test_a_completion_without_a_prompt_is_a_feature(template: Template, empty: Any) -> None:
    """The first token has nothing to be predicted from; the others are labelled."""
    joined = template.concat_input_feature(empty, [5, 6])
    assert list(joined['labels']) == [6, -100]
    assert list(joined['completion_mask']) == [1, 1]


def test_no_new_tokens_change_no_label(template: Template) -> None:
    """An empty completion leaves what there is."""
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
def test_what_does_not_fit_is_refused_by_field(template: Template, prompt: Any, new: Any, field: str) -> None:
    """Nothing is stretched or cut to fit."""
    with pytest.raises(InvalidFeature) as caught:
        template.concat_input_feature(prompt, new)
    assert caught.value.field == field
    assert pickle.loads(pickle.dumps(caught.value)).field == field


def test_a_sampled_thought_that_the_prompt_opened_is_taken_apart(tmp_path: Path) -> None:
    """Qwen3.5's turns come back without the opening tag; as a message they render as they were sampled."""
    template = tiny_template(tmp_path, 'tagged', kind=Qwen3_5Template)
    asked = {'role': 'user', 'content': 'q'}
    prompt = template.render({'messages': [asked]}, add_generation_prompt=True)
    sampled = 'so\n</think>\n\nyes'
    turn: Any = template.format_trajectory({'messages': [asked, {'role': 'assistant', 'content': sampled}]})
    assert turn['messages'][1] == {'role': 'assistant', 'content': 'yes', 'reasoning_content': 'so'}
    assert template.render(turn) == f'{prompt}{sampled}<|im_end|>\n'


def test_thinking_switched_off_closes_the_thought(tmp_path: Path) -> None:
    """The prompt then ends behind an empty thought, and only the answer is trained on."""
    template = tiny_template(tmp_path, 'tagged', kind=Qwen3_5Template, enable_thinking=False)
    assert not template.opens_thought
    feature = template.encode({'messages': CHAT[:2]})
    assert template.decode([int(label) for label in feature['labels'] if label != -100]) == 'yes<|im_end|>'
