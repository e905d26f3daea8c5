"""Tests of exhausted memory, with a model that raises an error for packs above a given size."""

from contextlib import nullcontext

import pytest
import torch

from twinkle.data_format import LoraConfig
from twinkle.model.engine import BatchItem, ForwardResult, TrainerEngine
from twinkle.model.engine.memory import OutOfMemoryInShardedPass, is_out_of_memory
from twinkle.model.errors import BatchTooLarge
from twinkle.nn import PackedCausalLM

CPU_MESSAGE = '[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: not enough memory: you tried to allocate 1 bytes.'
ERRORS = [torch.OutOfMemoryError('CUDA out of memory.'), RuntimeError(CPU_MESSAGE), MemoryError()]


class LimitedModel(PackedCausalLM):
    """Model that raises `error` for packs of more than `max_rows` tokens, after their forward pass and its dropout."""

    max_rows = 10**9
    error = ERRORS[0]
    refusals = 0

    def hidden(self, input_ids_T, position_ids_T, **arguments):
        """Run the pack; then raise the error if the pack is too large."""
        result = super().hidden(input_ids_T, position_ids_T, **arguments)
        if len(input_ids_T) > self.max_rows:
            self.refusals += 1
            raise self.error
        return result


class WholeSharding:
    """Sharding over a single rank, which stores all weights; implements `BaseSharding`."""

    pass_inputs = ()

    def whole_weights(self):
        """Return an empty context."""
        return nullcontext()

    def running_pass(self):
        """Return an empty context."""
        return nullcontext()

    def gathered(self, parameter):
        """Return the parameter."""
        return parameter


@pytest.fixture
def limited(tiny_llama_dir):
    """Model whose memory can be limited."""
    return LimitedModel.load(tiny_llama_dir)


def new_engine(model, names, *, dropout=0.2, **options):
    """Return a trainer with the named adapters."""
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
def test_a_shared_pass_is_split_by_items_without_changing_results(limited, make_feature, error):
    """A pass of four adapters that does not fit runs as smaller passes, with bitwise the same results."""
    names = 'abcd'
    items = [BatchItem(adapter_id=name, features=[make_feature(20, 1)], is_training=True) for name in names]
    unlimited, constrained = new_engine(limited, names), new_engine(limited, names)
    expected = unlimited.run_batch(items)
    limited.max_rows, limited.error = 45, error
    results = constrained.run_batch(items)
    assert limited.refusals == 1
    for name, result, other in zip(names, results, expected, strict=True):
        assert (result.loss_sum, result.warnings, result.pass_count) == (other.loss_sum, (), 1)
        assert (result.pass_adapter_count, other.pass_adapter_count) == (2, 4)
        assert state_of(constrained, name) == state_of(unlimited, name)


def test_only_the_part_that_does_not_fit_is_halved(limited, make_feature):
    """A batch that does not fit runs as two halves, with a warning; other batches are bitwise unchanged."""
    large = [make_feature(12, seed) for seed in range(5)]
    items = [
        BatchItem(adapter_id='a', features=large, is_training=True),
        BatchItem(adapter_id='b', features=[make_feature(9)], is_training=True),
    ]
    # Dropout is off, because the halves would sample different dropout masks from the whole batch.
    unlimited, constrained = new_engine(limited, 'ab', dropout=0.0), new_engine(limited, 'ab', dropout=0.0)
    expected = unlimited.run_batch(items)
    limited.max_rows = 30
    results = constrained.run_batch(items)
    assert [result.num_tokens for result in results] == [result.num_tokens for result in expected]
    assert results[0].loss_sum == pytest.approx(expected[0].loss_sum, rel=1e-5)
    assert [len(values) for values in results[0].logps] == [12] * 5
    assert (results[0].pass_count, results[1].pass_count) == (3, 1)
    assert (results[0].is_divided, results[1].is_divided) == (True, False)
    assert (len(results[0].warnings), results[1].warnings) == (1, ())
    for own, other in zip(constrained.adapter('a').parameters(), unlimited.adapter('a').parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, atol=1e-5, rtol=1e-4)
    assert state_of(constrained, 'b') == state_of(unlimited, 'b')


def test_indivisible_part_is_refused(limited, make_feature):
    """A batch with a feature that does not fit is refused without changes; other batches are unaffected."""
    unlimited, constrained = new_engine(limited, 'ab'), new_engine(limited, 'ab')
    items = [
        BatchItem(adapter_id='a', features=[make_feature(9), make_feature(50)], is_training=True),
        BatchItem(adapter_id='b', features=[make_feature(9)], is_training=True),
    ]
    expected = unlimited.run_batch(items)[1]
    before = state_of(constrained, 'a')
    limited.max_rows = 30
    refusal, result = constrained.run_batch(items)
    assert isinstance(refusal, BatchTooLarge)
    assert (refusal.token_count, refusal.token_limit) == (50, 49)
    assert state_of(constrained, 'a') == before
    assert isinstance(result, ForwardResult)
    assert result.loss_sum == expected.loss_sum
    assert state_of(constrained, 'b') == state_of(unlimited, 'b')


def test_a_later_part_that_does_not_fit_undoes_the_earlier_ones(limited, make_feature):
    """When a later part does not fit, the whole batch is refused and its earlier parts are undone."""
    engine = new_engine(limited, 'a', max_pass_tokens=20)
    engine.forward_backward('a', [make_feature(7)])
    before = state_of(engine, 'a')
    limited.max_rows = 30
    with pytest.raises(BatchTooLarge):
        engine.forward_backward('a', [make_feature(18), make_feature(15), make_feature(40)])
    assert state_of(engine, 'a') == before
    with pytest.raises(BatchTooLarge):
        engine.forward_only('a', [make_feature(40)])
    with pytest.raises(BatchTooLarge):
        engine.forward('a', [make_feature(40)])
    assert state_of(engine, 'a') == before


def test_a_loss_over_the_whole_batch_is_not_divided(limited, make_feature):
    """A batch that does not fit is refused if its loss is not a sum over features."""
    engine = new_engine(limited, 'a')
    engine.set_loss('a', lambda batch: {'loss': batch.logps_R.sum() ** 2})
    limited.max_rows = 30
    with pytest.raises(BatchTooLarge) as refusal:
        engine.forward_backward('a', [make_feature(20), make_feature(20)])
    assert refusal.value.token_count == 40


def test_groups_stay_together_when_a_part_is_halved(limited, make_feature):
    """Halving a part never separates a pair, and a pair that does not fit is refused."""
    engine = new_engine(limited, 'a')
    engine.set_loss('a', 'DPOLoss', reference_free=True)
    pairs = [make_feature(10, seed) for seed in range(8)]
    limited.max_rows = 25
    assert engine.forward_backward('a', pairs).pass_count == 4
    limited.max_rows = 19
    with pytest.raises(BatchTooLarge) as refusal:
        engine.forward_backward('a', pairs)
    assert refusal.value.token_count == 20


def test_other_errors_are_raised_unchanged(limited, make_feature):
    """An exception other than exhausted memory is raised unchanged, and no adapter changes."""
    engine = new_engine(limited, 'ab')
    items = [BatchItem(adapter_id=name, features=[make_feature(20)], is_training=True) for name in 'ab']
    before = [state_of(engine, name) for name in 'ab']
    limited.max_rows, limited.error = 1, RuntimeError('a defect')
    with pytest.raises(RuntimeError, match='a defect'):
        engine.run_batch(items)
    assert [state_of(engine, name) for name in 'ab'] == before


@pytest.mark.parametrize('error', ERRORS, ids=['cuda', 'cpu', 'python'])
@pytest.mark.parametrize('verb', ['forward', 'forward_only', 'forward_backward'])
def test_memory_that_runs_out_in_a_sharded_pass_is_no_refusal(limited, make_feature, error, verb):
    """Exhausted memory in a sharded pass raises OutOfMemoryInShardedPass instead of refusing the batch."""
    engine = new_engine(limited, 'a')
    limited.sharding, limited.max_rows, limited.error = WholeSharding(), 8, error
    with pytest.raises(OutOfMemoryInShardedPass) as caught:
        getattr(engine, verb)('a', [make_feature(20, 1)])
    assert not is_out_of_memory(caught.value)
