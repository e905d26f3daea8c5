"""Tests of `TransformersModel` methods with a loss for one batch or options for one step."""

import pytest

from twinkle.component import InvalidComponentOptions
from twinkle.data_format import LoraConfig
from twinkle.model import TransformersModel
from twinkle.model.errors import InvalidArgument, InvalidStepOptions


@pytest.fixture
def model(tiny_llama_dir) -> TransformersModel:
    """Model with one adapter."""
    model = TransformersModel(model_id=str(tiny_llama_dir))
    model.add_adapter_to_model('default', LoraConfig(r=2, seed=1))
    return model


def test_loss_of_one_batch(model, make_feature):
    """A loss for one batch does not replace the adapter's loss. Its options need a loss; unknown ones are refused."""
    feature = make_feature(advantages=[1.0] * 12, old_logps=[-5.0] * 12)
    output = model.forward_backward([feature], loss='cispo', loss_options={'clip_high_threshold': 2.0})
    assert output['metrics'] == {'loss:sum': output['loss']}
    assert model.forward_only([make_feature()])['metrics'] == {}
    with pytest.raises(InvalidComponentOptions):
        model.forward_only([feature], loss='cispo', loss_options={'epsilon': 2.0})
    with pytest.raises(InvalidArgument):
        model.forward_only([feature], loss_options={'beta': 1.0})


def test_size_of_micro_batches(model, make_feature):
    """Forward methods use `micro_batch_size`, and refuse an invalid number."""
    features = [make_feature(8, index) for index in range(3)]
    whole, divided = model.forward_only(features), model.forward_only(features, micro_batch_size=1)
    assert divided['loss'] == pytest.approx(whole['loss'], rel=1e-6)
    with pytest.raises(InvalidArgument, match='micro_batch_size'):
        model.forward_backward(features, micro_batch_size=0)


def test_options_of_one_step(model, make_feature):
    """`step` and `clip_grad_and_step` accept options for one step, and refuse unsupported options."""
    model.forward_backward([make_feature()])
    assert model.step(optimizer_options={'weight_decay': 0.5}).learning_rate == 0.001
    assert model.clip_grad_and_step(learning_rate=0.25, optimizer_options={'eps': 1e-12}).learning_rate == 0.25
    with pytest.raises(InvalidStepOptions):
        model.step(optimizer_options={'amsgrad': True})
    with pytest.raises(TypeError):
        model.clip_grad_and_step(momentum=0.9)
