"""Stored and downloaded folders load in plain PEFT with the same weights and scaling."""

import io
import tarfile
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from fixtures.checkpoint_service import ALICE, Running, as_tenant, serving
from twinkle.api.checkpoint.v1 import checkpoint_service_pb2, weights_pb2
from twinkle.checkpoint_engine import PackedState, pack_state
from twinkle.data_format import LoraConfig, TensorData
from twinkle_services.kit.rpc.context import acting_for

CONFIGS = {
    'plain': LoraConfig(r=4, lora_alpha=6, lora_dropout=0.1, seed=1),
    'rank-stabilised': LoraConfig(r=4, lora_alpha=6.5, use_rslora=True, target_modules=('q_proj', 'down_proj')),
    'patterns': LoraConfig(
        r=4, target_modules=('q_proj', 'v_proj'), rank_pattern={'v_proj': 2}, alpha_pattern={'q_proj': 3.0}
    ),
}


@pytest.mark.parametrize('name', CONFIGS)
async def test_saved_and_downloaded_folders_load_in_peft(tmp_path: Path, tiny_qwen3_dir: Path, name: str) -> None:
    """A model from the stored or downloaded folder has bitwise the same logits as the original."""
    config = CONFIGS[name]
    model = _peft_model(tiny_qwen3_dir, config)
    async with serving(tmp_path) as service:
        with acting_for(ALICE):
            target = weights_pb2.CheckpointTarget(name='final')
            state = _state_of(model, config, base_model=str(tiny_qwen3_dir))
            saved = (await service.weights.save_checkpoint('ad-1', state, target)).checkpoint
        archive = await _download(service, saved.path)
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(tmp_path / 'unpacked', filter='data')
    for folder in (saved.folder, tmp_path / 'unpacked'):
        base = AutoModelForCausalLM.from_pretrained(tiny_qwen3_dir)
        loaded = peft.PeftModel.from_pretrained(base, folder).eval()
        assert torch.equal(_logits(loaded), _logits(model))
        assert not torch.equal(_logits(loaded.unload()), _logits(model))


def _peft_model(folder: Path, config: LoraConfig) -> peft.PeftModel:
    """Return a model with random LoRA weights, because PEFT's initial weights do not change results."""
    values = {field: getattr(config, field) for field in config.__dataclass_fields__ if field != 'seed'}
    targets = values.pop('target_modules')
    peft_config = peft.LoraConfig(
        **values, target_modules=targets if isinstance(targets, str) else list(targets), task_type='CAUSAL_LM'
    )
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder), peft_config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(generator=generator, std=0.1)
    return model.eval()


def _state_of(model: peft.PeftModel, config: LoraConfig, *, base_model: str) -> PackedState:
    weights = peft.get_peft_model_state_dict(model)
    tensors = {name: TensorData.from_numpy(tensor.detach().numpy()) for name, tensor in weights.items()}
    return pack_state(tensors, base_model=base_model, lora_config=config)


def _logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(1, 20)[None]).logits


async def _download(service: Running, path: str) -> bytes:
    request = checkpoint_service_pb2.DownloadCheckpointRequest(checkpoint_path=path)
    call = service.checkpoints.DownloadCheckpoint(request, metadata=as_tenant('alice'))
    return b''.join([response.chunk.data async for response in call])
