"""Rates and momenta with which torch gives up in the middle of a step are refused before anything changes."""

import pytest

from twinkle.component import InvalidComponentOptions
from twinkle.model.errors import AdapterNotReady, InvalidArgument


def trained_bits(engine, adapter_id):
    """Return weights and what the optimizer gathered as bytes."""
    state = engine.adapter(adapter_id)
    tensors = [*state.parameters(), *(item for own in state.optimizer.state.values() for item in own.values())]
    return [tensor.detach().numpy().tobytes() for tensor in tensors]


@pytest.fixture
def engine(engine, draw_feature):
    """The adapter has a gradient."""
    engine.forward_backward('a', [draw_feature(9)])
    return engine


@pytest.mark.parametrize('optimizer', ['AdamW', 'Adamax', 'NAdam', 'RAdam', 'SGD', 'Muon', 'Adafactor'])
def test_a_rate_that_overflows_changes_nothing(engine, draw_feature, optimizer):
    """The largest number that float32 holds, for one step: refused, or taken whole."""
    engine.set_optimizer('a', optimizer)
    engine.forward_backward('a', [draw_feature(9)])
    before = trained_bits(engine, 'a')
    try:
        engine.step('a', learning_rate=3.4e38)
    except InvalidArgument:
        assert trained_bits(engine, 'a') == before
        assert engine.adapter('a').step_count == 0
    assert engine.step('a', learning_rate=0.001).is_applied


def test_a_schedule_that_takes_the_momentum_to_1_is_stopped_in_time(engine, draw_feature):
    """Adam divides by 1 minus its momentum; the step that would is refused whole."""
    engine.set_optimizer('a', 'AdamW', lr=0.01)
    options = {'base_lr': 0.01, 'max_lr': 0.1, 'step_size_up': 2, 'base_momentum': 0.8, 'max_momentum': 1.0}
    try:
        engine.set_lr_scheduler('a', 'CyclicLR', **options)
    except InvalidComponentOptions:
        return
    for _ in range(6):
        engine.forward_backward('a', [draw_feature(9)])
        before = trained_bits(engine, 'a')
        try:
            engine.clip_grad_and_step('a')
        except AdapterNotReady:
            assert trained_bits(engine, 'a') == before
            return
    pytest.fail('the momentum never reached 1')


@pytest.mark.parametrize('power', [None, [], 'x', -1.0])
def test_options_of_schedules_are_numbers(engine, power):
    """A type that nothing can be calculated with is refused by name, in words of ours."""
    with pytest.raises(InvalidComponentOptions, match='power must be a number'):
        engine.set_lr_scheduler('a', 'PolynomialLR', power=power)


@pytest.mark.parametrize('options', [{'betas': None}, {'eps': 'x'}, {'weight_decay': [1]}, {'betas': [0.9]}])
def test_a_type_of_no_use_is_refused_in_our_words(engine, options):
    """What Python says of the code that met it is of no use to who sent it."""
    with pytest.raises(InvalidComponentOptions) as caught:
        engine.set_optimizer('a', 'AdamW', **options)
    assert not any(word in caught.value.problem for word in ('object', 'instances', 'argument', 'tuple'))
