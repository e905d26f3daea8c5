"""Tests of the owners of adapters: their choice, and the state that the other ranks keep."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from twinkle.data_format import LoraConfig
from twinkle.model.engine import TrainerEngine
from twinkle.model.errors import SnapshotMismatch
from twinkle.nn import PackedCausalLM


@dataclass(frozen=True)
class _Owner:
    """Owner of an adapter in a group without communication."""

    rank: int
    is_this_rank: bool

    def run(self, call: str, work: Callable[[], Any], *, updated: Sequence[torch.Tensor] = ()) -> Any:
        """Run the work if this rank is the owner."""
        assert self.is_this_rank, call
        assert all(tensor.requires_grad for tensor in updated)
        return work()

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Do nothing."""
        del tensors


@dataclass(frozen=True)
class _Group:
    """One rank's view of a group of three ranks, without communication or passes."""

    rank: int
    size: int = 3

    def exchange(self, mine: Any, passes: Any) -> list[Any]:
        """Refuse to run passes."""
        raise NotImplementedError

    def agree(self, error: Exception | None) -> Exception | None:
        """Return the error of this rank."""
        return error

    def owner(self, rank: int) -> _Owner:
        """Return a rank as the owner."""
        return _Owner(rank, rank == self.rank)


def _owners(engine: TrainerEngine) -> list[int | None]:
    owners = [engine.adapter(name).owner for name in engine.adapter_ids]
    return [None if owner is None else owner.rank for owner in owners]


def test_owner_is_the_rank_that_owns_the_fewest_parameters(model: PackedCausalLM) -> None:
    """Adapters of different sizes are distributed evenly; after an adapter is deleted, its rank is the next owner."""
    engine = TrainerEngine(model, group=_Group(rank=1))
    for index, lora_rank in enumerate((8, 4, 2, 4, 4)):
        engine.create_adapter(str(index), LoraConfig(r=lora_rank, seed=0))
    assert _owners(engine) == [0, 1, 2, 2, 1]
    engine.delete_adapter('0')
    engine.create_adapter('5', LoraConfig(r=1, seed=0))
    assert _owners(engine) == [1, 2, 2, 1, 0]


def test_single_process_and_full_parameter_runs_have_no_owner(model: PackedCausalLM) -> None:
    """An engine without a group and a full-parameter run have no owner, because each process keeps the whole state."""
    alone, ranks = TrainerEngine(model), TrainerEngine(model, group=_Group(rank=1))
    alone.create_adapter('a', LoraConfig(r=2, seed=0))
    assert alone.adapter('a').owner is None
    state = ranks.create_full_adapter('full')
    assert state.owner is None
    assert state.is_held_here


@pytest.mark.parametrize('optimizer', ['AdamW', 'Adagrad', 'Muon'])
def test_other_ranks_restore_everything_but_gradient_and_optimizer_state(model, make_feature, optimizer) -> None:
    """The owner of a restored adapter has the snapshot's moments and gradient, and the other ranks have none.

    This includes Adagrad, which allocates its state as soon as it is built.
    """
    alone = TrainerEngine(model)
    alone.create_adapter('a', LoraConfig(r=2, seed=0))
    alone.set_optimizer('a', optimizer, lr=1e-2)
    alone.set_lr_scheduler('a', 'LinearLR', total_iters=5)
    alone.forward_backward('a', [make_feature()])
    alone.clip_grad_and_step('a')
    alone.forward_backward('a', [make_feature(seed=1)])
    snapshot, expected = alone.snapshot('a'), alone.adapter('a')
    assert snapshot is not None
    for rank in (0, 1):
        engine = TrainerEngine(model, group=_Group(rank))
        engine.create_adapter('b', LoraConfig(r=2, seed=0))
        engine.set_optimizer('b', optimizer, lr=1e-2)
        engine.import_state('b', snapshot, is_optimizer_included=True)
        engine.delete_adapter('b')
        state = engine.restore_adapter('a', snapshot)
        assert state.is_held_here is (rank == 0)
        is_state_empty = [not state.optimizer.state, all(item.grad is None for item in state.parameters())]
        assert is_state_empty == [rank != 0] * 2
        assert state.optimization.copy_groups() == expected.optimization.copy_groups()
        assert state.scheduler is not None
        counters = ('step_count', 'batch_count', 'divisor', 'learning_rate')
        assert [getattr(state, name) for name in counters] == [getattr(expected, name) for name in counters]
        for own, other in zip(state.parameters(), expected.parameters(), strict=True):
            assert torch.equal(own, other)
            assert rank != 0 or torch.equal(own.grad, other.grad)


def test_every_rank_refuses_a_snapshot_with_wrong_moments(model, make_feature) -> None:
    """All ranks refuse a snapshot with wrong moments, even ranks that would not keep the moments."""
    alone = TrainerEngine(model)
    alone.create_adapter('a', LoraConfig(r=2, seed=0))
    alone.forward_backward('a', [make_feature()])
    alone.step('a')
    snapshot = alone.snapshot('a')
    assert snapshot is not None
    trainer = dict(snapshot.trainer or {})
    name = next(name for name, data in trainer.items() if name.startswith('optimizer.') and len(data.shape) > 1)
    other = next(data for data in trainer.values() if data.shape != trainer[name].shape and len(data.shape) > 1)
    broken = type(snapshot)(snapshot.lora_config, snapshot.adapter, {**trainer, name: other}, snapshot.step_count)
    for rank in range(3):
        engine = TrainerEngine(model, group=_Group(rank))
        with pytest.raises(SnapshotMismatch):
            engine.restore_adapter('a', broken)
        assert engine.adapter_ids == ()
