"""Tests of activation checkpointing: the same results with less stored memory."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from fixtures import isolation
from twinkle.nn import PackedCausalLM


@pytest.mark.parametrize('name', ['tiny_llama_dir', 'tiny_qwen3_dir'])
def test_checkpointing_does_not_change_results(name, request):
    """Checkpointing changes no log-probability and no gradient, because recomputation uses the same dropout masks."""
    folder = request.getfixturevalue(name)
    plain, checkpointed = (PackedCausalLM.load(folder, is_checkpointed=flag) for flag in (False, True))
    for seed in range(3):
        tenants = isolation.draw_tenants(seed, longest=60)
        pairs = zip(isolation.results(plain, tenants), isolation.results(checkpointed, tenants), strict=True)
        for own, recomputed in pairs:
            assert all(torch.equal(own[key], recomputed[key]) for key in own)


def test_checkpointing_stores_less(tiny_llama_dir):
    """Checkpointing stores less than a third of the bytes that autograd saves without it."""

    def stored_bytes(*, is_checkpointed: bool) -> int:
        model = PackedCausalLM.load(tiny_llama_dir, is_checkpointed=is_checkpointed)
        (tenant,) = isolation.draw_tenants(0)[:1]
        stored: dict[int, int] = {}

        def record(tensor: torch.Tensor) -> torch.Tensor:
            stored[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        weights = tenant.weights(model)
        rows = 400
        span = isolation.SequenceSpan(0, rows)
        with saved_tensors_hooks(record, lambda tensor: tensor):
            model.hidden(
                torch.zeros(rows, dtype=torch.int64),
                torch.arange(rows),
                sequences=[span],
                adapters=[isolation.AdapterSpan(0, rows, weights)],
            )
        return sum(stored.values())

    assert 3 * stored_bytes(is_checkpointed=True) < stored_bytes(is_checkpointed=False)
