"""Tests of operations while the disk of the checkpoint service is full."""

import resource
from pathlib import Path

import pytest

from fixtures.checkpoint_service import ServiceProcess, failure_of
from fixtures.model_service import draw_example, forward_backward, serving_model_at
from fixtures.tiers import mostly_slow
from twinkle.api.model.v1 import operation_pb2 as wire

FULL_BYTES = 1024
"""Largest file that the checkpoint service can write while its disk counts as full."""


@pytest.mark.parametrize('verb', mostly_slow(['save', 'publish_version']))
async def test_save_on_a_full_disk_does_not_use_its_number(tiny_llama_dir: Path, tmp_path: Path, verb: str) -> None:
    """A save or publication that fails on a full disk consumes no operation number; it succeeds once there is space."""
    saves = {
        'save': {'save': wire.Save(name='best', is_optimizer_included=True)},
        'publish_version': {'publish_version': wire.PublishVersion(is_pinned=True)},
    }
    process = await ServiceProcess.start(tmp_path)
    try:
        async with serving_model_at(process.address, tiny_llama_dir, tmp_path) as model:
            adapter_id = (await model.create()).adapter_id
            await model.result(adapter_id, 1, forward_backward=forward_backward([draw_example()]))
            limits = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (FULL_BYTES, limits[1]))
            failure = await failure_of(model.execute(adapter_id, 2, **saves[verb]))
            assert (failure.code, failure.reason) == ('UNAVAILABLE', 'STORE_UNAVAILABLE')
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, limits)
            # Another operation can use the number, and the refused operation can follow.
            await model.result(adapter_id, 2, clip_grad_and_step=wire.ClipGradAndStep(max_grad_norm=0.5))
            result = await model.result(adapter_id, 3, **saves[verb])
            assert result.WhichOneof('outcome') == verb.partition('_')[0]
    finally:
        await process.kill()
