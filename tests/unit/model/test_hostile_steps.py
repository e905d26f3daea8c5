"""Tests that invalid learning rates, momenta and options are refused without changes."""

import pytest

from twinkle.component import InvalidComponentOptions
from twinkle.model.errors import AdapterNotReady, InvalidArgument


def state_bytes(engine, adapter_id):
    """Return weights and optimizer state as bytes."""
    state = engine.adapter(adapter_id)
    tensors = [*state.parameters(), *(item for own in state.optimizer.state.values() for item in own.values())]
    return [tensor.detach().numpy().tobytes() for tensor in tensors]


@pytest.fixture
def engine(engine, make_feature):
    """Trainer whose adapter has a gradient."""
    engine.forward_backward('a', [make_feature(9)])
    return engine


@pytest.mark.parametrize('optimizer', ['AdamW', 'Adamax', 'NAdam', 'RAdam', 'SGD', 'Muon', 'Adafactor'])
def test_a_rate_that_overflows_changes_nothing(engine, make_feature, optimizer):
    """A step with a learning rate near the float32 maximum completes or is refused without changes; later steps run."""
    engine.set_optimizer('a', optimizer)
    engine.forward_backward('a', [make_feature(9)])
    before = state_bytes(engine, 'a')
    try:
        engine.step('a', learning_rate=3.4e38)
    except InvalidArgument:
        assert state_bytes(engine, 'a') == before
        assert engine.adapter('a').step_count == 0
    assert engine.step('a', learning_rate=0.001).is_applied


def test_momentum_of_1_is_refused(engine, make_feature):
    """A schedule that reaches momentum 1, where Adam divides by 0, is refused when it is set or before that step."""
    engine.set_optimizer('a', 'AdamW', lr=0.01)
    options = {'base_lr': 0.01, 'max_lr': 0.1, 'step_size_up': 2, 'base_momentum': 0.8, 'max_momentum': 1.0}
    try:
        engine.set_lr_scheduler('a', 'CyclicLR', **options)
    except InvalidComponentOptions:
        return
    for _ in range(6):
        engine.forward_backward('a', [make_feature(9)])
        before = state_bytes(engine, 'a')
        try:
            engine.clip_grad_and_step('a')
        except AdapterNotReady:
            assert state_bytes(engine, 'a') == before
            return
    pytest.fail('the momentum never reached 1')


@pytest.mark.parametrize('power', [None, [], 'x', -1.0])
def test_options_of_schedules_are_numbers(engine, power):
    """A schedule option of a wrong type or with a negative value is refused, and the message names the option."""
    with pytest.raises(InvalidComponentOptions, match='power must be a number'):
        engine.set_lr_scheduler('a', 'PolynomialLR', power=power)


@pytest.mark.parametrize('options', [{'betas': None}, {'eps': 'x'}, {'weight_decay': [1]}, {'betas': [0.9]}])
def test_message_about_a_wrong_type_has_no_internals(engine, options):
    """Messages about malformed optimizer options do not contain Python internals."""
    with pytest.raises(InvalidComponentOptions) as caught:
        engine.set_optimizer('a', 'AdamW', **options)
    assert not any(word in caught.value.problem for word in ('object', 'instances', 'argument', 'tuple'))
