"""Routing replay in the model service: recorded experts are returned, journaled and used by later passes."""

from pathlib import Path

import numpy as np
import pytest

from fixtures.checkpoint_service import failure_of
from fixtures.mixture_model import CONFIG, build_mixture
from fixtures.model_service import serving_model
from twinkle.api.model.v1 import operation_pb2 as wire
from twinkle.api.model.v1 import training_config_pb2
from twinkle_client.model.forward import forward_fields, forward_output

LORA = training_config_pb2.LoraConfig(lora_rank=4, seed=3, target_modules=['all-linear', 'all-experts'])
SHAPE = (CONFIG.num_hidden_layers, CONFIG.num_experts_per_tok)
FEATURES = [
    {'input_ids': np.arange(5, 15), 'labels': np.where(np.arange(10) < 4, -100, np.arange(6, 16))},
    {'input_ids': np.arange(20, 27), 'labels': np.arange(21, 28)},
]
RECORDED = {'return_routed_experts': True}


def with_experts(experts) -> list[dict]:
    """Return the features, each with its experts."""
    return [{**feature, 'routed_experts': own} for feature, own in zip(FEATURES, experts, strict=True)]


async def test_recorded_experts_are_replayed(tmp_path: Path) -> None:
    """A pass with the recorded experts reproduces the recorded results bitwise, and other experts change its loss."""
    folder = build_mixture(tmp_path / 'mixture')
    async with serving_model(folder, tmp_path) as model:
        adapter_id = (await model.create(lora_config=LORA)).adapter_id
        result = await model.result(adapter_id, 1, forward_only=forward_fields(FEATURES, RECORDED))
        recorded = forward_output(result)
        experts = recorded['routed_experts']
        assert [(own.dtype, own.shape) for own in experts] == [(np.uint8, (10, *SHAPE)), (np.uint8, (7, *SHAPE))]
        result = await model.result(adapter_id, 2, forward_backward=forward_fields(with_experts(experts), {}))
        replayed = forward_output(result)
        assert replayed['loss'] == recorded['loss']
        assert all(map(np.array_equal, replayed['logps'], recorded['logps']))
        assert replayed['routed_experts'] == []
        others = with_experts([(own.astype(np.int64) + 1) % CONFIG.num_experts for own in experts])
        changed = forward_output(await model.result(adapter_id, 3, forward_only=forward_fields(others, RECORDED)))
        assert changed['loss'] != recorded['loss']
        assert all(map(np.array_equal, changed['routed_experts'], (feature['routed_experts'] for feature in others)))


async def test_experts_survive_a_restart(tmp_path: Path) -> None:
    """A repeated operation returns the recorded experts, and training continues as without the restart."""
    folder = build_mixture(tmp_path / 'mixture')
    adapter_ids, losses = [], []
    async with serving_model(folder, tmp_path) as model:
        for name in ('r1', 'r2'):
            adapter_ids.append((await model.create(request_id=name, lora_config=LORA)).adapter_id)
            fields = forward_fields(FEATURES, RECORDED)
            experts = forward_output(await model.result(adapter_ids[-1], 1, forward_only=fields))['routed_experts']
            for number in (2, 4):
                batch = forward_fields(with_experts(experts), RECORDED)
                await model.result(adapter_ids[-1], number, forward_backward=batch)
                await model.result(adapter_ids[-1], number + 1, clip_grad_and_step=wire.ClipGradAndStep())
        batch = forward_fields(with_experts(experts), RECORDED)
        losses.append(forward_output(await model.result(adapter_ids[0], 6, forward_only=batch))['loss'])
    async with serving_model(folder, tmp_path) as model:
        repeated = await model.result(adapter_ids[1], 1, forward_only=fields)
        assert repeated.is_replayed
        assert all(map(np.array_equal, forward_output(repeated)['routed_experts'], experts))
        losses.append(forward_output(await model.result(adapter_ids[1], 6, forward_only=batch))['loss'])
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ('change', 'problem'),
    [
        (lambda own: own[:, :1], 'must have shape'),
        (lambda own: np.full_like(own, 8), 'contains 8'),
        (np.zeros_like, 'twice'),
    ],
)
async def test_wrong_experts_are_refused_by_name(tmp_path: Path, change, problem: str) -> None:
    """The error for experts of a wrong shape, out of range or listed twice names their field."""
    folder = build_mixture(tmp_path / 'mixture')
    async with serving_model(folder, tmp_path) as model:
        adapter_id = (await model.create(lora_config=LORA)).adapter_id
        fields = forward_fields(FEATURES, RECORDED)
        experts = forward_output(await model.result(adapter_id, 1, forward_only=fields))['routed_experts']
        fields = forward_fields(with_experts([change(own) for own in experts]), {})
        failure = await failure_of(model.execute(adapter_id, 2, forward_backward=fields))
        assert (failure.code, failure.metadata['field']) == ('INVALID_ARGUMENT', 'features[0].routed_experts')
        assert problem in failure.message


async def test_dense_model_refuses_experts(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """A base model without experts refuses to replay experts and to return them."""
    async with serving_model(tiny_llama_dir, tmp_path) as model:
        adapter_id = (await model.create()).adapter_id
        experts = [np.zeros((len(feature['input_ids']), 1, 1), np.uint8) for feature in FEATURES]
        for fields in (forward_fields(FEATURES, RECORDED), forward_fields(with_experts(experts), {})):
            failure = await failure_of(model.execute(adapter_id, 1, forward_only=fields))
            assert failure.code == 'INVALID_ARGUMENT'
            assert 'routed_experts' in failure.message + failure.metadata.get('field', '')
