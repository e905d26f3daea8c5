"""Samples of an uploaded adapter, which plain PEFT saved, equal those of transformers with PEFT."""

import io
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from fixtures.checkpoint_service import as_tenant, serving, stream_of
from fixtures.sampler_service import PROMPT, read_answer, sample_request, serving_sampler, tenant
from twinkle.api.checkpoint.v1 import checkpoint_service_pb2 as wire
from twinkle.api.sampler.v1 import sampling_pb2
from twinkle.checkpoint_engine import iter_chunks, unpack_state
from twinkle.sampler.engine import EngineConfig
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.rpc.channel import open_channel
from twinkle_services.kit.rpc.context import acting_for
from twinkle_services.kit.weights.wire import WeightClient, chunk_to_proto
from twinkle_services.sampler.backends.checkpoint_client import CheckpointClient
from twinkle_services.sampler.backends.torch_engine import TorchEngine, TorchEngineOptions

NEW_TOKENS = 24


def saved_by_peft(model_dir: Path, folder: Path, **fields: Any) -> peft.PeftModel:
    """Save an adapter that changes results strongly, and return the model with this adapter."""
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, lora_alpha=16, task_type='CAUSAL_LM', init_lora_weights=False, **fields)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model_dir), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if 'lora_' in name:
                parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    return model.eval()


def engine_of(model_dir: Path) -> TorchEngine:
    """Return an engine whose model has the same name as in the checkpoint service."""
    limits = EngineConfig(max_sequences=8, max_batch_tokens=64, prefill_chunk_tokens=16)
    name = str(model_dir)
    return TorchEngine(TorchEngineOptions(base_model=name, folder=name, limits=limits, mailbox_events=4))


def archive_of(folder: Path) -> bytes:
    """Return a folder as a compressed tar archive."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode='w:gz') as archive:
        archive.add(folder, 'adapter')
    return buffer.getvalue()


def greedy(model: Any) -> list[int]:
    """Return the tokens that transformers samples after the prompt."""
    input_ids = torch.tensor([PROMPT])
    options = {'max_new_tokens': NEW_TOKENS, 'min_new_tokens': NEW_TOKENS, 'do_sample': False, 'eos_token_id': None}
    with torch.no_grad():
        generated = model.generate(input_ids=input_ids, attention_mask=torch.ones_like(input_ids), **options)
    return generated[0, len(PROMPT) :].tolist()


@pytest.fixture
async def checkpoints(tmp_path: Path, tiny_llama_dir: Path) -> AsyncIterator[Any]:
    """A checkpoint service with the model in its configuration."""
    async with serving(tmp_path / 'checkpoints', base_models=(str(tiny_llama_dir),)) as running:
        yield running


@pytest.mark.parametrize(
    'fields',
    [
        {'target_modules': ['q_proj', 'v_proj', 'down_proj']},
        {'target_modules': 'all-linear', 'use_rslora': True},
        {'target_modules': ['q_proj', 'o_proj'], 'rank_pattern': {'o_proj': 2}, 'alpha_pattern': {'q_proj': 8}},
    ],
    ids=['plain', 'rslora', 'patterns'],
)
async def test_uploaded_adapter_gives_the_tokens_of_peft(
    checkpoints: Any, tmp_path: Path, tiny_llama_dir: Path, fields: dict[str, Any]
) -> None:
    """Sampling from an uploaded adapter gives PEFT's tokens, and fetching it gives PEFT's tensors."""
    model = saved_by_peft(tiny_llama_dir, tmp_path / 'adapter', **fields)
    data = archive_of(tmp_path / 'adapter')
    header = wire.CheckpointUploadHeader(
        upload_id='up', name='mine', base_model=str(tiny_llama_dir), size_bytes=len(data)
    )
    parts = [wire.UploadCheckpointRequest(chunk=chunk_to_proto(chunk)) for chunk in iter_chunks(data)]
    requests = stream_of(wire.UploadCheckpointRequest(header=header), *parts)
    uploaded = (await checkpoints.checkpoints.UploadCheckpoint(requests, metadata=as_tenant('alice'))).checkpoint
    async with open_channel(checkpoints.address) as channel:
        with acting_for(Caller(tenant_id='alice', is_internal=True)):
            state = (await WeightClient(channel).fetch_checkpoint(uploaded.path)).state
        fetched = unpack_state(state.manifest, state.data)
        assert {name: tensor.to_numpy().tolist() for name, tensor in fetched.items()} == {
            name: value.numpy().tolist() for name, value in peft.get_peft_model_state_dict(model).items()
        }
        engine, source = engine_of(tiny_llama_dir), CheckpointClient(channel)
        async with serving_sampler(engine, source, tmp_path / 'sampler') as sampler:
            adapter = sampling_pb2.AdapterRef(checkpoint_path=uploaded.path)
            params = {'max_tokens': NEW_TOKENS, 'temperature': 0.0}
            request = sample_request(adapter, params=params, base_model=str(tiny_llama_dir))
            answer = await read_answer(sampler.stub.Sample(request, metadata=tenant('alice')))
        await engine.close()
    with model.disable_adapter():
        base = greedy(model)
    assert answer.tokens == [greedy(model)]
    assert answer.tokens != [base]
