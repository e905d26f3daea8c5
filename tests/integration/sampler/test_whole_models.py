"""Tests of full-parameter weights on a sampler that all tenants share."""

from pathlib import Path

import numpy as np
from google.protobuf import duration_pb2

from fixtures.checkpoint_service import ALICE as ALICE_SERVICE
from fixtures.checkpoint_service import failure_of, serving
from fixtures.sampler_service import read_answer, sample_request, serving_sampler, tenant
from twinkle.api.sampler.v1 import sampler_service_pb2 as wire
from twinkle.api.sampler.v1 import sampling_pb2
from twinkle.checkpoint_engine import PackedState, pack_state
from twinkle.data_format import TensorData
from twinkle_services.kit.rpc.channel import open_channel
from twinkle_services.kit.rpc.context import acting_for
from twinkle_services.sampler.backends.checkpoint_client import CheckpointClient
from twinkle_services.sampler.backends.torch_engine import TorchEngine, TorchEngineOptions

ALICE = tenant('alice')
WHOLE = sampling_pb2.AdapterRef(adapter_id='full', wait_timeout=duration_pb2.Duration(seconds=20))


def whole_state() -> PackedState:
    """Return a state with one full-parameter tensor."""
    weights = {'model.norm.weight': TensorData.from_numpy(np.full(64, 3, np.float32))}
    return pack_state(weights, base_model='tiny', lora_config=None)


async def test_a_shared_base_is_not_replaced_for_one_tenant(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """Full-parameter weights are refused with a reason, and answers of the base model are unchanged."""
    engine = TorchEngine(TorchEngineOptions(base_model='tiny', folder=str(tiny_llama_dir)))
    async with serving(tmp_path / 'checkpoint') as checkpoint:
        channel = open_channel(checkpoint.address)
        async with serving_sampler(engine, CheckpointClient(channel), tmp_path / 'sampler') as sampler:
            before = await read_answer(sampler.stub.Sample(sample_request(params={'temperature': 0.0}), metadata=ALICE))
            with acting_for(ALICE_SERVICE):
                await checkpoint.weights.publish_version('full', whole_state(), version=1)
            for call in (
                sampler.stub.LoadAdapter(wire.LoadAdapterRequest(adapter=WHOLE), metadata=ALICE),
                sampler.stub.Sample(sample_request(WHOLE), metadata=ALICE),
            ):
                assert (await failure_of(call)).reason == 'ADAPTER_NOT_READY'
            after = await read_answer(sampler.stub.Sample(sample_request(params={'temperature': 0.0}), metadata=ALICE))
            assert after == before
        await channel.close()
        await engine.close()
