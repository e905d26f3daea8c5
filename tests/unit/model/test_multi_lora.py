"""Limits of `MultiLoraTransformersModel`."""

import pytest

from twinkle.data_format import LoraConfig
from twinkle.infra import NotSupportedYet
from twinkle.model import InvalidArgument, MultiLoraTransformersModel


def test_shared_model_requires_an_adapter(tiny_llama_dir):
    """A trainer for several tenants refuses an optimizer without an adapter."""
    with pytest.raises(NotSupportedYet):
        MultiLoraTransformersModel(str(tiny_llama_dir)).set_optimizer('AdamW', lr=1e-2)


def test_multi_lora_is_bounded(tiny_llama_dir):
    """An adapter with a rank above max_r is refused; an adapter beyond max_loras is refused until one is removed."""
    model = MultiLoraTransformersModel(str(tiny_llama_dir), max_loras=1, max_r=8)
    with pytest.raises(InvalidArgument, match='max_r'):
        model.add_adapter_to_model('a', LoraConfig(r=4, rank_pattern={'q_proj': 16}))
    model.add_adapter_to_model('a', LoraConfig(r=4))
    with pytest.raises(InvalidArgument, match='max_loras'):
        model.add_adapter_to_model('b', LoraConfig(r=4))
    model.remove_adapter('a')
    model.add_adapter_to_model('b', LoraConfig(r=4))


def test_multi_lora_bounds_the_length(tiny_llama_dir, make_feature):
    """An example longer than max_length is refused with an error that contains its index."""
    model = MultiLoraTransformersModel(str(tiny_llama_dir), max_length=10)
    model.add_adapter_to_model('a', LoraConfig(r=4))
    model.forward_only(make_feature(10))
    with pytest.raises(InvalidArgument, match=r'features\[1\]'):
        model.forward_only([make_feature(10), make_feature(11)])
