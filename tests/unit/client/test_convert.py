"""Conversion of user input to messages, and errors that name the invalid field."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle.api.data.v1 import message_pb2
from twinkle.api.model.v1 import training_config_pb2
from twinkle.data_format import SamplingParams
from twinkle_client.convert import (
    component_config,
    feature_from_proto,
    features_to_proto,
    full_parameter_config,
    lora_config,
    loss_config,
    optimizer_config,
    prompt_to_proto,
    sampling_params,
    trajectory_from_proto,
    trajectory_to_proto,
)

TOKENS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20)


@given(TOKENS)
def test_feature_round_trip(tokens: list[int]) -> None:
    """Ids, labels and weights are unchanged after conversion to a message and back."""
    feature = {'input_ids': tokens, 'labels': [-100] * len(tokens), 'loss_weights': [0.5] * len(tokens)}
    back = feature_from_proto(features_to_proto([feature]).features[0])
    assert list(back['input_ids']) == tokens
    assert list(back['labels']) == feature['labels']
    assert list(back['loss_weights']) == feature['loss_weights']


def test_padding_is_removed() -> None:
    """Positions outside the attention mask are not sent."""
    feature = {'input_ids': [[7, 8, 0]], 'labels': [8, -100, -100], 'attention_mask': [1, 1, 0]}
    back = feature_from_proto(features_to_proto([feature]).features[0])
    assert list(back['input_ids']) == [7, 8]
    assert list(back['labels']) == [8, -100]


def test_keys_for_rewards_are_not_sent() -> None:
    """Chats, user data, samples and lengths are not sent, because only local reward functions use them."""
    feature = {'input_ids': [1], 'messages': [{}], 'user_data': [], 'samples': [{}], 'length': 1}
    message = features_to_proto([feature]).features[0]
    assert [descriptor.name for descriptor, _ in message.ListFields()] == ['input_ids']


def test_extra_streams_are_sent_by_name() -> None:
    """Additional per-token values of a loss are sent for the unmasked tokens, even if each token has several values."""
    feature = {
        'input_ids': [7, 8, 0],
        'attention_mask': [1, 1, 0],
        'returns': [0.5, 1.5, 9.0],
        'teacher_topk_ids': [[1, 2], [3, 4], [0, 0]],
        'teacher_topk_logps': np.full((3, 2), -1.0),
    }
    back = feature_from_proto(features_to_proto([feature]).features[0])
    assert list(back['returns']) == [0.5, 1.5]
    assert back['teacher_topk_ids'].tolist() == [[1, 2], [3, 4]]
    assert back['teacher_topk_logps'].shape == (2, 2)


def test_experts_are_sent_for_the_first_unmasked_tokens() -> None:
    """Experts of the first tokens are sent in the smallest dtype, without those of masked tokens."""
    feature = {
        'input_ids': [7, 8, 0, 9],
        'attention_mask': [1, 0, 1, 1],
        'routed_experts': [[[5, 1]], [[2, 3]], [[255, 0]]],
    }
    sent = feature_from_proto(features_to_proto([feature]).features[0])['routed_experts']
    assert sent.dtype == np.uint8
    assert sent.tolist() == [[[5, 1]], [[255, 0]]]
    large = features_to_proto([{**feature, 'routed_experts': [[[256, 1]]]}]).features[0]
    assert feature_from_proto(large)['routed_experts'].dtype == np.int32
    masked = features_to_proto([{**feature, 'attention_mask': [0, 0, 1, 1], 'routed_experts': [[[5, 1]]]}]).features[0]
    assert not masked.HasField('routed_experts')
    with pytest.raises(ValueError, match=r'features\[0\].routed_experts has 5 rows'):
        features_to_proto([{**feature, 'routed_experts': [[[0, 1]]] * 5}])


def test_per_label_stream_is_aligned_with_the_labels() -> None:
    """A per-label stream has one number for each label that is not ignored; ignored labels get 0.0."""
    feature = {'input_ids': [1, 2, 3], 'labels': [-100, 3, 4]}
    back = feature_from_proto(features_to_proto([feature], per_label={'returns': [[0.5, 1.5]]}).features[0])
    assert list(back['returns']) == [0.0, 0.5, 1.5]


@pytest.mark.parametrize(
    ('feature', 'per_label', 'field'),
    [
        ({}, {}, r'features\[0\].input_ids'),
        ('text', {}, r'features\[0\] must be a mapping'),
        ({'input_ids': [1], 'advntages': [0.5]}, {}, 'advntages.* advantages'),
        ({'input_ids': [1.5]}, {}, 'input_ids'),
        ({'input_ids': [2**40]}, {}, 'input_ids'),
        ({'input_ids': [1, 2], 'labels': [1]}, {}, 'labels'),
        ({'input_ids': [1], 'note': 'text'}, {}, 'note'),
        ({'input_ids': [1], 'noise': [0.5]}, {}, 'noise'),
        ({'input_ids': [1], 'returns': [[0.5], [0.5]]}, {}, 'returns'),
        ({'input_ids': [1, 2], 'returns': [0.5]}, {}, 'returns'),
        ({'input_ids': [1], 'teacher_topk_ids': [1]}, {}, 'teacher_topk_ids'),
        ({'input_ids': [1], 'teacher_topk_ids': [[1.5]]}, {}, 'teacher_topk_ids'),
        ({'input_ids': [1], 'labels': [1]}, {'teacher_logits': [1.0]}, 'teacher_logits'),
        ({'input_ids': [1]}, {'advantages': [1.0]}, 'labels'),
        ({'input_ids': [1, 2], 'labels': [-100, 2]}, {'old_logps': [[1.0, 2.0, 3.0]]}, 'old_logps'),
        ({'input_ids': [1], 'labels': [1]}, {'advantages': [1.0, 2.0]}, 'advantages'),
    ],
)
def test_invalid_feature_is_named(feature: dict, per_label: dict, field: str) -> None:
    """The error for an invalid feature names the field."""
    with pytest.raises(ValueError, match=field):
        features_to_proto([feature], per_label=per_label)


def test_chat_round_trip() -> None:
    """Chat messages and user data are unchanged by conversion to protobuf and back; tool arguments are parsed."""
    trajectory = {
        'messages': [
            {'role': 'system', 'content': 'be kind'},
            {'role': 'user', 'content': [{'type': 'text', 'text': 'a'}, {'type': 'image', 'image': b'png'}]},
            {
                'role': 'assistant',
                'content': '',
                'tool_calls': [{'id': 'c1', 'function': {'name': 'f', 'arguments': '{"x": 1}'}}],
                'reasoning_content': 'hm',
            },
            {'role': 'tool', 'content': 'done', 'tool_call_id': 'c1'},
        ],
        'tools': [{'type': 'function', 'function': {'name': 'f', 'description': 'd', 'parameters': {}}}],
        'user_data': [('target', '7')],
    }
    message = trajectory_to_proto(trajectory)
    assert message.messages[0].role == message_pb2.ROLE_SYSTEM
    back = trajectory_from_proto(message)
    assert back['messages'][0] == trajectory['messages'][0]
    assert back['messages'][2]['tool_calls'][0]['function'] == {'name': 'f', 'arguments': {'x': 1}}
    assert back['messages'][3] == trajectory['messages'][3]
    assert back['user_data'] == [('target', '7')]


@pytest.mark.parametrize(
    ('trajectory', 'field'),
    [
        ({'messages': []}, 'messages'),
        ({'messages': [{'role': 'bot', 'content': 'x'}]}, r'messages\[0\].role'),
        ({'messages': [{'role': 'user', 'content': [{'type': 'smell'}]}]}, r'content\[0\]'),
    ],
)
def test_malformed_message_is_named(trajectory: dict, field: str) -> None:
    """The error for an invalid trajectory names the field."""
    with pytest.raises(ValueError, match=field):
        trajectory_to_proto(trajectory)


def test_zero_is_sent_and_unset_is_not() -> None:
    """A temperature or token limit of zero is sent, and an unset seed is not sent."""
    message = sampling_params(SamplingParams(temperature=0.0, max_tokens=0), num_samples=3)
    assert message.HasField('temperature')
    assert message.HasField('max_tokens')
    assert not message.HasField('seed')
    assert message.sample_count == 3


def test_unknown_sampling_parameter_is_refused() -> None:
    """A misspelled sampling parameter raises a ValueError that names the parameter."""
    with pytest.raises(ValueError, match='top_q'):
        sampling_params({'top_q': 1})


@pytest.mark.parametrize('prompt', [[], {'input_ids': []}, {'messages': []}])
def test_empty_prompt_is_refused(prompt: object) -> None:
    """A prompt without tokens or messages raises ValueError."""
    with pytest.raises(ValueError, match=r'prompt|messages'):
        prompt_to_proto(prompt)


def test_peft_configuration_is_read() -> None:
    """An object with the fields of a PEFT configuration is accepted; the error for an unsupported option names it."""

    class PeftConfig:
        r = 4
        lora_alpha = 32
        lora_dropout = 0.05
        target_modules = frozenset({'v_proj', 'q_proj'})
        use_rslora = False
        use_dora = False
        bias = 'none'
        init_lora_weights = True

    message = lora_config(PeftConfig())
    assert (message.lora_rank, message.lora_alpha, list(message.target_modules)) == (4, 32.0, ['q_proj', 'v_proj'])
    PeftConfig.use_dora = True
    with pytest.raises(ValueError, match='use_dora'):
        lora_config(PeftConfig())


def test_components_are_sent_by_name() -> None:
    """A class is sent as its name and tuples as lists, and an object is refused."""
    config = optimizer_config('AdamW', {'lr': 0.0, 'betas': (0.9, 0.95), 'fused': None})
    assert config.HasField('learning_rate')
    assert list(config.options['betas']) == [0.9, 0.95]
    assert component_config(SamplingParams, {}).name == 'SamplingParams'
    with pytest.raises(TypeError):
        component_config(SamplingParams(), {})


def test_parameter_groups_are_sent() -> None:
    """Pattern and rate become fields, the other keys become options, and a group without a pattern is refused."""
    config = optimizer_config('AdamW', {'lr': 0.1, 'groups': [{'pattern': 'lora_B', 'lr': 0.0, 'weight_decay': 0}]})
    group = config.groups[0]
    assert (group.pattern, group.HasField('learning_rate'), dict(group.options)) == (
        'lora_B',
        True,
        {'weight_decay': 0},
    )
    assert 'groups' not in config.options
    with pytest.raises(ValueError, match=r'groups\[0\]'):
        optimizer_config('AdamW', {'groups': [{'lr': 0.1}]})


def test_patterns_with_another_meaning_are_refused() -> None:
    """A longer pattern after a shorter matching pattern is refused, because the service prefers the longest match."""
    message = lora_config({'rank_pattern': {'layers.1.q': 5, 'q': 2}, 'alpha_pattern': {'v': 3.0}})
    assert (dict(message.rank_pattern), dict(message.alpha_pattern)) == ({'layers.1.q': 5, 'q': 2}, {'v': 3.0})
    with pytest.raises(ValueError, match=r"alpha_pattern\['layers\.1\.q'\]"):
        lora_config({'alpha_pattern': {'q': 2.0, 'layers.1.q': 5.0}})


@pytest.mark.parametrize('options', [{'lr': '1e-3'}, {'lr': True}, {'groups': [{'pattern': 'lora_B', 'lr': '1e-3'}]}])
def test_learning_rate_must_be_a_number(options: dict) -> None:
    """A learning rate that is text, as a YAML file may contain, is refused with an error that names its field."""
    with pytest.raises(ValueError, match='lr must be a number'):
        optimizer_config('AdamW', options)


@pytest.mark.parametrize(
    ('name', 'reduction', 'expected'),
    [
        ('CrossEntropyLoss', None, training_config_pb2.LOSS_REDUCTION_MEAN),
        ('GRPOLoss', None, training_config_pb2.LOSS_REDUCTION_UNSPECIFIED),
        ('CrossEntropyLoss', 'sum', training_config_pb2.LOSS_REDUCTION_SUM),
        ('GRPOLoss', 'mean', training_config_pb2.LOSS_REDUCTION_MEAN),
    ],
)
def test_default_reduction_depends_on_the_loss(name: str, reduction: str | None, expected: int) -> None:
    """Losses with their own scaling keep it by default, and an explicit reduction is sent."""
    assert loss_config(name, {}, reduction=reduction).reduction == expected


def test_full_parameter_names_select_modules() -> None:
    """False gives no configuration, True selects all modules, and names select the named modules."""
    assert full_parameter_config(names=False) is None
    assert list(full_parameter_config(names=True).target_modules) == []
    assert list(full_parameter_config(names='mlp').target_modules) == ['mlp']
    assert list(full_parameter_config(names=('mlp', 'norm')).target_modules) == ['mlp', 'norm']


def test_empty_selection_of_parameters_is_refused() -> None:
    """An empty list is refused, because the contract would interpret it as all parameters."""
    with pytest.raises(ValueError, match='at least one module'):
        full_parameter_config(names=[])


def test_pixel_values_are_refused() -> None:
    """A feature with pixel values is refused, because it would be sent without its image."""
    feature = {'input_ids': [1, 5], 'labels': [-100, -100], 'position_ids': [[0, 1]] * 3, 'pixel_values': [[0.0]]}
    with pytest.raises(ValueError, match='pixel_values'):
        features_to_proto([feature])
