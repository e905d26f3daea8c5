"""Checkpointed layers give the same bits and keep less."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from fixtures import isolation
from twinkle.nn import PackedCausalLM


@pytest.mark.parametrize('name', ['tiny_llama_dir', 'tiny_qwen3_dir'])
def test_checkpointing_changes_no_bit(name, request):
    """Mixes with dropout get the same log-probabilities and gradients: what is run again draws the same."""
    folder = request.getfixturevalue(name)
    plain, checkpointed = (PackedCausalLM.load(folder, is_checkpointed=flag) for flag in (False, True))
    for seed in range(3):
        tenants = isolation.draw_tenants(seed, longest=60)
        pairs = zip(isolation.results(plain, tenants), isolation.results(checkpointed, tenants), strict=True)
        for own, again in pairs:
            assert all(torch.equal(own[key], again[key]) for key in own)


def test_checkpointing_keeps_less(tiny_llama_dir):
    """Of what the graph keeps, the layers' activations are gone."""

    def kept_bytes(*, is_checkpointed: bool) -> int:
        model = PackedCausalLM.load(tiny_llama_dir, is_checkpointed=is_checkpointed)
        (tenant,) = isolation.draw_tenants(0)[:1]
        kept: dict[int, int] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        weights = tenant.weights(model)
        rows = 400
        span = isolation.SequenceSpan(0, rows)
        with saved_tensors_hooks(note, lambda tensor: tensor):
            model.hidden(
                torch.zeros(rows, dtype=torch.int64),
                torch.arange(rows),
                sequences=[span],
                adapters=[isolation.AdapterSpan(0, rows, weights)],
            )
        return sum(kept.values())

    assert 3 * kept_bytes(is_checkpointed=True) < kept_bytes(is_checkpointed=False)
