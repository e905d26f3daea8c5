"""What happens when memory runs out, injected by a model that refuses packs above a size."""

import pytest
import torch

from twinkle.data_format import LoraConfig
from twinkle.model.engine import BatchItem, ForwardResult, TrainerEngine
from twinkle.model.errors import BatchTooLarge
from twinkle.nn import PackedCausalLM

CPU_MESSAGE = '[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: not enough memory: you tried to allocate 1 bytes.'
ERRORS = [torch.OutOfMemoryError('CUDA out of memory.'), RuntimeError(CPU_MESSAGE), MemoryError()]


class StarvedModel(PackedCausalLM):
    """Has no memory for packs of more than `max_rows` rows; draws dropout before it notices, as a real one."""

    max_rows = 10**9
    error = ERRORS[0]
    refusals = 0

    def hidden(self, input_ids_T, position_ids_T, **arguments):
        """Run the pack, and refuse it afterwards if it is too large."""
        result = super().hidden(input_ids_T, position_ids_T, **arguments)
        if len(input_ids_T) > self.max_rows:
            self.refusals += 1
            raise self.error
        return result


@pytest.fixture
def starved(tiny_llama_dir):
    """A model that can be starved."""
    return StarvedModel.load(tiny_llama_dir)


def new_engine(model, names, *, dropout=0.2, **options):
    """Return a trainer with adapters."""
    engine = TrainerEngine(model, **options)
    for index, name in enumerate(names):
        engine.create_adapter(name, LoraConfig(r=4, seed=index, lora_dropout=dropout))
    return engine


def state_of(engine, name):
    """Return gradient, counters and random state as comparable values."""
    state = engine.adapter(name)
    gradients = [None if item.grad is None else item.grad.numpy().tobytes() for item in state.parameters()]
    return gradients, state.batch_count, state.divisor, state.weights.dropout_generator.get_state().numpy().tobytes()


@pytest.mark.parametrize('error', ERRORS, ids=['cuda', 'cpu', 'python'])
def test_a_shared_pass_is_split_by_items_and_changes_no_bit(starved, draw_feature, error):
    """Four adapters whose pass does not fit run in smaller ones, each with the bits it has anyway."""
    names = 'abcd'
    items = [BatchItem(adapter_id=name, features=[draw_feature(20, 1)], is_training=True) for name in names]
    roomy, tight = new_engine(starved, names), new_engine(starved, names)
    expected = roomy.run_batch(items)
    starved.max_rows, starved.error = 45, error
    results = tight.run_batch(items)
    assert starved.refusals == 1
    for name, result, other in zip(names, results, expected, strict=True):
        assert (result.loss_sum, result.warnings, result.pass_count) == (other.loss_sum, (), 1)
        assert (result.pass_adapter_count, other.pass_adapter_count) == (2, 4)
        assert state_of(tight, name) == state_of(roomy, name)


def test_a_lone_part_is_halved_and_its_neighbour_is_not(starved, draw_feature):
    """A batch that does not fit alone runs in halves, says so, and adds up; the small one keeps its bits."""
    large = [draw_feature(12, seed) for seed in range(5)]
    items = [
        BatchItem(adapter_id='a', features=large, is_training=True),
        BatchItem(adapter_id='b', features=[draw_feature(9)], is_training=True),
    ]
    # Without dropout: halves draw other masks than the whole.
    roomy, tight = new_engine(starved, 'ab', dropout=0.0), new_engine(starved, 'ab', dropout=0.0)
    expected = roomy.run_batch(items)
    starved.max_rows = 30
    results = tight.run_batch(items)
    assert [result.num_tokens for result in results] == [result.num_tokens for result in expected]
    assert results[0].loss_sum == pytest.approx(expected[0].loss_sum, rel=1e-5)
    assert [len(values) for values in results[0].logps] == [12] * 5
    assert (results[0].pass_count, results[1].pass_count) == (3, 1)
    assert (results[0].is_divided, results[1].is_divided) == (True, False)
    assert (len(results[0].warnings), results[1].warnings) == (1, ())
    for own, other in zip(tight.adapter('a').parameters(), roomy.adapter('a').parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, atol=1e-5, rtol=1e-4)
    assert state_of(tight, 'b') == state_of(roomy, 'b')


def test_what_cannot_be_divided_is_refused_alone(starved, draw_feature):
    """One feature that does not fit refuses its whole batch and leaves no trace; the neighbour goes on."""
    roomy, tight = new_engine(starved, 'ab'), new_engine(starved, 'ab')
    items = [
        BatchItem(adapter_id='a', features=[draw_feature(9), draw_feature(50)], is_training=True),
        BatchItem(adapter_id='b', features=[draw_feature(9)], is_training=True),
    ]
    expected = roomy.run_batch(items)[1]
    before = state_of(tight, 'a')
    starved.max_rows = 30
    refusal, result = tight.run_batch(items)
    assert isinstance(refusal, BatchTooLarge)
    assert (refusal.token_count, refusal.token_limit) == (50, 49)
    assert state_of(tight, 'a') == before
    assert isinstance(result, ForwardResult)
    assert result.loss_sum == expected.loss_sum
    assert state_of(tight, 'b') == state_of(roomy, 'b')


def test_a_later_part_that_does_not_fit_undoes_the_earlier_ones(starved, draw_feature):
    """A batch of several parts is refused whole."""
    engine = new_engine(starved, 'a', max_pass_tokens=20)
    engine.forward_backward('a', [draw_feature(7)])
    before = state_of(engine, 'a')
    starved.max_rows = 30
    with pytest.raises(BatchTooLarge):
        engine.forward_backward('a', [draw_feature(18), draw_feature(15), draw_feature(40)])
    assert state_of(engine, 'a') == before
    with pytest.raises(BatchTooLarge):
        engine.forward_only('a', [draw_feature(40)])
    with pytest.raises(BatchTooLarge):
        engine.forward('a', [draw_feature(40)])
    assert state_of(engine, 'a') == before


def test_a_loss_over_the_whole_batch_is_not_divided(starved, draw_feature):
    """Where the loss is no sum over features, a batch that does not fit is refused."""
    engine = new_engine(starved, 'a')
    engine.set_loss('a', lambda batch: {'loss': batch.logps_R.sum() ** 2})
    starved.max_rows = 30
    with pytest.raises(BatchTooLarge) as refusal:
        engine.forward_backward('a', [draw_feature(20), draw_feature(20)])
    assert refusal.value.token_count == 40


def test_groups_stay_together_when_a_part_is_halved(starved, draw_feature):
    """Pairs are never parted, however little memory there is."""
    engine = new_engine(starved, 'a')
    engine.set_loss('a', 'DPOLoss', reference_free=True)
    pairs = [draw_feature(10, seed) for seed in range(8)]
    starved.max_rows = 25
    assert engine.forward_backward('a', pairs).pass_count == 4
    starved.max_rows = 19
    with pytest.raises(BatchTooLarge) as refusal:
        engine.forward_backward('a', pairs)
    assert refusal.value.token_count == 20


def test_other_errors_are_not_taken_for_memory(starved, draw_feature):
    """What is a defect is raised as it is, and leaves every adapter as it was."""
    engine = new_engine(starved, 'ab')
    items = [BatchItem(adapter_id=name, features=[draw_feature(20)], is_training=True) for name in 'ab']
    before = [state_of(engine, name) for name in 'ab']
    starved.max_rows, starved.error = 1, RuntimeError('a defect')
    with pytest.raises(RuntimeError, match='a defect'):
        engine.run_batch(items)
    assert [state_of(engine, name) for name in 'ab'] == before
