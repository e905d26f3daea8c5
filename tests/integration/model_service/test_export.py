"""Export of merged models from a running service."""

from pathlib import Path

from safetensors import safe_open

from fixtures.checkpoint_service import failure_of
from fixtures.model_service import draw_example, forward_backward, serving_model
from twinkle.api.model.v1 import operation_pb2 as wire


async def test_a_merged_model_is_written_below_the_state_folder(service, tmp_path):
    """ExportMerged writes a model folder in which only adapted weights differ; a repeat returns the recorded result."""
    adapter = await service.create(lora_config={'lora_rank': 4})
    await service.result(adapter.adapter_id, 1, forward_backward=forward_backward([draw_example()]))
    await service.result(adapter.adapter_id, 2, clip_grad_and_step=wire.ClipGradAndStep())
    verb = {'export_merged': wire.ExportMerged(name='final')}
    exported = await service.result(adapter.adapter_id, 3, **verb)
    assert exported.save.folder == f'exports/{adapter.adapter_id}/final'
    merged, base = _weights(tmp_path / exported.save.folder), _weights(service.base_model)
    assert set(merged) == set(base)
    changed = {name for name in base if not (merged[name] == base[name]).all()}
    assert changed
    assert all('proj' in name for name in changed)
    assert (await service.result(adapter.adapter_id, 3, **verb)).is_replayed


async def test_export_above_the_limit_of_a_tenant_is_refused(tiny_llama_dir, tmp_path):
    """An export above `merged_models_per_tenant` fails with QUOTA_EXCEEDED and does not consume its sequence number."""
    async with serving_model(tiny_llama_dir, tmp_path, merged_models_per_tenant=0) as service:
        adapter = await service.create(lora_config={'lora_rank': 4})
        failure = await failure_of(
            service.execute(adapter.adapter_id, 1, export_merged=wire.ExportMerged(name='final'))
        )
        assert (failure.code, failure.reason) == ('RESOURCE_EXHAUSTED', 'QUOTA_EXCEEDED')
        await service.result(adapter.adapter_id, 1, forward_backward=forward_backward([draw_example()]))


def _weights(folder):
    (path,) = Path(folder).glob('*.safetensors')
    with safe_open(path, framework='pt') as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
