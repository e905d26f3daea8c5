"""Full-parameter training and estimates over sockets with a real engine."""

from pathlib import Path

import grpc
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from fixtures import checkpoint_service
from fixtures.model_service import RunningModel, batch_of, serving_model
from fixtures.tiny_model import build_tiny_model
from twinkle.api.model.v1 import adapter_service_pb2
from twinkle.data_format import InputFeature, SamplingParams
from twinkle.sampler import TorchSampler
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.rpc.context import acting_for
from twinkle_services.kit.rpc.tensors import tensor_from_proto
from twinkle_services.kit.weights.wire import WeightClient

FEATURES = [InputFeature(input_ids=list(range(5, 30)), labels=list(range(6, 31)))]
RATE = {'optimizer': {'name': 'AdamW', 'learning_rate': 1e-3}}


async def test_base_model_is_trained_exported_and_restored(tmp_path: Path) -> None:
    """Training reduces the loss, the exported model has the reduced loss, and the base model is restored bitwise."""
    folder = build_tiny_model(tmp_path / 'model')
    async with serving_model(folder, tmp_path / 'state', full_parameters=True) as running:
        lora = (await running.create(request_id='lora', lora_config={'seed': 3})).adapter_id
        before = await running.result(lora, 1, forward_only={'batch': batch_of(FEATURES)})
        with acting_for(Caller(tenant_id='alice', is_internal=True)):
            await running.internal_adapters.ParkAdapter(adapter_service_pb2.ParkAdapterRequest(adapter_id=lora))
        full = (await running.create(request_id='full', full_parameters={}, training_config=RATE)).adapter_id
        losses: list[float] = []
        for number in range(1, 12, 2):
            result = await running.result(full, number, forward_backward={'batch': batch_of(FEATURES)})
            losses.append(result.forward.loss)
            await running.result(full, number + 1, clip_grad_and_step={})
        assert losses[-1] < 0.8 * losses[0]
        trained = await running.result(full, 13, forward_only={'batch': batch_of(FEATURES)})
        exported = await running.result(full, 14, export_merged={'name': 'whole'})
        await running.adapters.DeleteAdapter(
            adapter_service_pb2.DeleteAdapterRequest(adapter_id=full), metadata=checkpoint_service.as_tenant('alice')
        )
        after = await running.result(lora, 2, forward_only={'batch': batch_of(FEATURES)})
        assert _logprobs(before).tobytes() == _logprobs(after).tobytes()
        assert _loss_of_exported_model(tmp_path / 'state' / exported.save.folder) == pytest.approx(
            trained.forward.loss, rel=1e-4
        )


async def test_published_weights_are_complete_models(tmp_path: Path) -> None:
    """Each published version is a complete model, with which a sampler computes bitwise the same log-probabilities."""
    folder = build_tiny_model(tmp_path / 'model')
    sampler = TorchSampler(str(folder))
    async with serving_model(folder, tmp_path / 'state', full_parameters=True) as running:
        full = await running.create(full_parameters={'target_modules': ['mlp']}, training_config=RATE)
        run = full.adapter_id
        digests: set[str] = set()
        for version, number in ((1, 1), (2, 5)):
            await running.result(run, number, forward_backward={'batch': batch_of(FEATURES)})
            await running.result(run, number + 1, clip_grad_and_step={})
            published = (await running.result(run, number + 2, publish_version={})).publish
            trained = await running.result(run, number + 3, forward_only={'batch': batch_of(FEATURES)})
            with acting_for(Caller(tenant_id='alice', is_internal=True)):
                received = await WeightClient(running.checkpoints.channel).fetch_version(run, published.version)
            manifest = received.state.manifest
            assert (published.version, published.digest, manifest.lora_config) == (version, manifest.digest, None)
            assert sampler.receive_weights(received.state) == version
            params = SamplingParams(max_tokens=0)
            (scored,) = sampler.sample([*FEATURES[0]['input_ids'], FEATURES[0]['labels'][-1]], params)
            assert np.array(scored.prompt_logprobs[1:], np.float32).tobytes() == _logprobs(trained).tobytes()
            digests.add(manifest.digest)
        assert len(digests) == 2


async def test_saved_run_continues_bitwise(tmp_path: Path) -> None:
    """A run that loads its checkpoint, and a new run that starts from it, repeat the training bitwise.

    The checkpoint contains the complete model, even if only some weights are trained. A LoRA adapter cannot start from
    this checkpoint, and a run that trains fewer weights cannot load its optimizer.
    """
    folder = build_tiny_model(tmp_path / 'model')
    chosen = {'target_modules': ['mlp', 'embed_tokens']}
    async with serving_model(folder, tmp_path / 'state', full_parameters=True) as running:
        run = (await running.create(full_parameters=chosen, training_config=RATE)).adapter_id
        await _train(running, run, 1)
        saved = (await running.result(run, 3, save={'name': 'middle', 'is_optimizer_included': True})).save
        expected = [await _train(running, run, 4), await _train(running, run, 6)]
        load = {'checkpoint_path': saved.checkpoint_path, 'is_optimizer_included': True}
        loaded = (await running.result(run, 8, load=load)).load
        assert loaded.step_count == 1
        assert [await _train(running, run, 9), await _train(running, run, 11)] == expected
        await running.result(run, 13, load={'checkpoint_path': saved.checkpoint_path})
        assert (await running.result(run, 14, forward_only={'batch': batch_of(FEATURES)})).forward.loss == expected[0]
        await running.adapters.DeleteAdapter(
            adapter_service_pb2.DeleteAdapterRequest(adapter_id=run), metadata=checkpoint_service.as_tenant('alice')
        )
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await running.create(request_id='lora', checkpoint_path=saved.checkpoint_path)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.aio.AioRpcError, match='embed_tokens'):
            await running.create(request_id='part', full_parameters={'target_modules': ['mlp']}, **load)
        again = (await running.create(request_id='again', full_parameters=chosen, **load)).adapter_id
        assert [await _train(running, again, 1), await _train(running, again, 3)] == expected
    stored = load_file(next((tmp_path / 'state').rglob('model.safetensors')))
    assert stored.keys() == load_file(folder / 'model.safetensors').keys()


async def _train(running: RunningModel, run: str, number: int) -> float:
    result = await running.result(run, number, forward_backward={'batch': batch_of(FEATURES)})
    await running.result(run, number + 1, clip_grad_and_step={})
    return result.forward.loss


async def test_second_full_parameter_run_is_refused(tmp_path: Path) -> None:
    """A second full-parameter adapter is refused while the first one exists, even with invalid fields."""
    folder = build_tiny_model(tmp_path / 'model')
    async with serving_model(folder, tmp_path / 'state', full_parameters=True) as running:
        created = await running.create(request_id='one', full_parameters={'target_modules': ['mlp']})
        assert not created.HasField('lora_config')
        assert list(created.full_parameters.target_modules) == ['mlp']
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await running.create(request_id='two', full_parameters={}, tenant='bob')
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await running.create(request_id='three', full_parameters={'target_modules': ['nothing']}, tenant='bob')
        assert unknown.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_estimate_is_exact_and_allocates_nothing(tmp_path: Path) -> None:
    """An estimate creates no adapter and has the parameter count of a later adapter; excessive sizes are refused."""
    async with serving_model(build_tiny_model(tmp_path / 'model'), tmp_path / 'state') as running:
        request = adapter_service_pb2.EstimateRequest(
            base_model=running.base_model,
            lora_config={'lora_rank': 4},
            optimizer={'name': 'AdamW'},
            batch_size=2,
            sequence_tokens=32,
        )
        estimate = await running.adapters.Estimate(request, metadata=checkpoint_service.as_tenant('alice'))
        assert running.backend.engine.adapter_ids == ()
        created = await running.create(lora_config={'lora_rank': 4})
        assert estimate.parameter_count == created.parameter_count
        assert estimate.adapter_bytes == 3 * 4 * created.parameter_count
        assert estimate.peak_bytes > estimate.adapter_bytes
        assert estimate.does_fit
        for field in ('sequence_tokens', 'batch_size'):
            too_large = adapter_service_pb2.EstimateRequest()
            too_large.CopyFrom(request)
            setattr(too_large, field, 100_000)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await running.adapters.Estimate(too_large, metadata=checkpoint_service.as_tenant('alice'))
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def _logprobs(result: object) -> np.ndarray:
    return tensor_from_proto(result.forward.logprobs[0], 'logprobs', dtypes=('float32',), dimensions=1)


def _loss_of_exported_model(folder: Path) -> float:
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids, labels = (torch.tensor([FEATURES[0][name]]) for name in ('input_ids', 'labels'))
    with torch.no_grad():
        logprobs = model(input_ids=ids).logits.log_softmax(-1).gather(2, labels[..., None])
    return -float(logprobs.sum())
