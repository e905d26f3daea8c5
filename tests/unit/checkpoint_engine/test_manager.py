"""Unit tests of `CheckpointEngineManager`, which copies weights from a trainer to a sampler in one process."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from fixtures.peft_oracle import build_peft_model
from fixtures.tiny_model import build_tiny_model
from twinkle.checkpoint_engine import (
    CheckpointEngine,
    CheckpointEngineManager,
    DigestMismatch,
    PackedState,
    WeightReceiver,
    unpack_state,
)
from twinkle.data_format import InputFeature, LoraConfig, SamplingParams
from twinkle.model import InvalidArgument, MultiLoraTransformersModel, TransformersModel, UnknownAdapter
from twinkle.nn import tensor_of
from twinkle.sampler import SamplerBusy, TorchSampler
from twinkle.sampler import UnknownAdapter as UnknownToSampler

FEATURE = InputFeature(input_ids=list(range(5, 25)), labels=list(range(6, 26)))
PROMPT = [5, 6, 7]
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


@pytest.fixture
def trainer(tiny_llama_dir: Path) -> TransformersModel:
    """A trainer whose adapter 'policy' has been trained for one step."""
    trainer = TransformersModel(str(tiny_llama_dir))
    trainer.add_adapter_to_model('policy', LoraConfig(r=4, lora_alpha=16, seed=1))
    trainer.set_optimizer('AdamW', lr=2e-2)
    learn(trainer)
    return trainer


@pytest.fixture
def sampler(tiny_llama_dir: Path) -> TorchSampler:
    """A sampler with a separate copy of the model."""
    return TorchSampler(str(tiny_llama_dir))


def learn(trainer: TransformersModel, adapter_name: str | None = None) -> None:
    """Train for one step."""
    trainer.forward_backward(FEATURE, adapter_name=adapter_name)
    trainer.clip_grad_and_step(adapter_name=adapter_name)


def scores(sampler: TorchSampler, adapter_name: str = '', **options) -> np.ndarray:
    """Return the sampler's log-probabilities of the tokens of `FEATURE` after the first token."""
    params = SamplingParams(max_tokens=0)
    (response,) = sampler.sample(list(FEATURE['input_ids']), params, adapter_name, **options)
    return np.array(response.prompt_logprobs[1:], np.float32)


def trained_scores(trainer: TransformersModel, **options) -> np.ndarray:
    """Return the trainer's log-probabilities of the tokens of `FEATURE` after the first token."""
    return np.asarray(trainer.forward_only(FEATURE, **options)['logps'][0], np.float32)[:-1]


def merged_by_peft(trainer: TransformersModel, folder: Path) -> torch.nn.Module:
    """Return the base model into which PEFT has merged the trainer's adapter."""
    config = peft.LoraConfig(r=4, lora_alpha=16, target_modules='all-linear', task_type='CAUSAL_LM')
    return build_peft_model(folder, config, trainer.get_state_dict()).merge_and_unload()


def test_a_synced_adapter_equals_the_trainers_bitwise(trainer, sampler):
    """Sampler and trainer agree bitwise after every sync, and sampled tokens have the new version."""
    manager = CheckpointEngineManager(model=trainer, sampler=sampler)
    for version in (1, 2, 3):
        synced = manager.sync_weights(merge_and_sync=False)
        assert (synced.version, synced.adapter_name, synced.base_size_bytes) == (version, 'policy', 0)
        assert scores(sampler).tobytes() == trained_scores(trainer).tobytes()
        (response,) = sampler.sample(PROMPT, GREEDY)
        assert [span.version for span in response.sequences[0].version_spans] == [version]
        learn(trainer)
    assert scores(sampler).tobytes() != trained_scores(trainer).tobytes()


class FileEngine(CheckpointEngine):
    """A user-defined engine that transfers weights through a file and can corrupt them."""

    def __init__(self, path: Path, *, is_corrupting: bool = False) -> None:
        self.path = path
        self.is_corrupting = is_corrupting
        self.carried: list[str] = []

    def carry(self, state: PackedState, receiver: WeightReceiver, *, adapter_name: str = '') -> int:
        """Write the state to a file, read it back, and pass it to the receiver."""
        self.path.write_bytes(bytes(state.data))
        content = bytearray(self.path.read_bytes())
        content[-1] ^= self.is_corrupting
        self.carried.append(adapter_name)
        return receiver.receive_weights(
            replace(state, data=memoryview(content).toreadonly()), adapter_name=adapter_name
        )


def test_a_user_defined_engine_transfers_weights(trainer, sampler, tmp_path):
    """Weights that pass through a file equal the trainer's weights; corrupt weights are refused and change nothing."""
    engine = FileEngine(tmp_path / 'weights')
    CheckpointEngineManager(trainer, sampler, engine=engine).sync_weights(merge_and_sync=False)
    assert engine.carried == ['policy']
    before = scores(sampler).tobytes()
    assert before == trained_scores(trainer).tobytes()
    learn(trainer)
    corrupting = CheckpointEngineManager(trainer, sampler, engine=FileEngine(tmp_path / 'weights', is_corrupting=True))
    with pytest.raises(DigestMismatch):
        corrupting.sync_weights(merge_and_sync=False)
    assert scores(sampler).tobytes() == before


def test_merged_weights_equal_those_of_peft(trainer, sampler, tiny_llama_dir):
    """The sampler's base weights equal PEFT's merged weights, and completions use the merged weights."""
    synced = CheckpointEngineManager(trainer, sampler).sync_weights()
    assert (synced.version, synced.adapter_name) == (1, '')
    state = trainer.export_weights(merge_lora=True)
    assert sampler.base_source.digest == synced.digest == state.manifest.digest
    merged = merged_by_peft(trainer, tiny_llama_dir)
    expected = dict(merged.named_parameters())
    sent = unpack_state(state.manifest, state.data)
    assert sent.keys() == expected.keys()
    for name, data in sent.items():
        torch.testing.assert_close(tensor_of(data), expected[name].detach(), rtol=1e-6, atol=1e-7)
    (response,) = sampler.sample(PROMPT, GREEDY)
    tokens = merged.generate(torch.tensor([PROMPT]), max_new_tokens=8, min_new_tokens=8, do_sample=False)
    assert response.sequences[0].tokens == tokens[0, 3:].tolist()
    assert response.sequences[0].version_spans[0].version == 1
    np.testing.assert_allclose(scores(sampler), trained_scores(trainer), atol=1e-4)


def test_merged_weights_are_replaced_by_the_base_and_an_adapter(trainer, sampler):
    """The first sync without merging restores the base weights; later syncs transfer only the adapter."""
    manager = CheckpointEngineManager(trainer, sampler)
    whole = manager.sync_weights(merge_and_sync=True)
    sizes = [manager.sync_weights(merge_and_sync=False).base_size_bytes for _ in range(3)]
    assert sizes == [whole.size_bytes, 0, 0]
    assert scores(sampler).tobytes() == trained_scores(trainer).tobytes()
    assert scores(sampler, use_base_model=True).tobytes() == trained_scores(trainer, disable_lora=True).tobytes()


def test_another_base_is_replaced_before_the_adapter(trainer, tmp_path):
    """A sampler with another base model receives the trainer's base weights once."""
    sampler = TorchSampler(str(build_tiny_model(tmp_path / 'other', seed=9)))
    manager = CheckpointEngineManager(trainer, sampler)
    assert manager.sync_weights(merge_and_sync=False).base_size_bytes > 0
    assert manager.sync_weights(merge_and_sync=False).base_size_bytes == 0
    assert scores(sampler).tobytes() == trained_scores(trainer).tobytes()


def test_full_parameter_weights_are_synced_completely(tiny_llama_dir, sampler):
    """Full-parameter training syncs every tensor, with or without `merge_and_sync`."""
    trainer = TransformersModel(str(tiny_llama_dir))
    trainer.engine.create_full_adapter('whole', ('mlp',))
    trainer.set_optimizer('AdamW', lr=1e-2)
    manager = CheckpointEngineManager(trainer, sampler)
    for version, merge_and_sync in ((1, True), (2, False)):
        learn(trainer)
        synced = manager.sync_weights(merge_and_sync)
        assert (synced.version, synced.adapter_name, synced.base_size_bytes) == (version, '', 0)
        assert scores(sampler).tobytes() == trained_scores(trainer).tobytes()


def test_several_adapters_must_be_named(tiny_llama_dir, sampler):
    """Calls must name an adapter if there are several, and a sync does not affect other adapters."""
    trainer = MultiLoraTransformersModel(str(tiny_llama_dir))
    manager = CheckpointEngineManager(trainer, sampler)
    for name, seed in (('a', 1), ('b', 2)):
        trainer.add_adapter_to_model(name, LoraConfig(r=4, seed=seed))
        trainer.set_optimizer('AdamW', lr=2e-2, adapter_name=name)
        learn(trainer, name)
        manager.sync_weights(merge_and_sync=False, adapter_name=name)
    for name in ('a', 'b'):
        assert scores(sampler, name).tobytes() == trained_scores(trainer, adapter_name=name).tobytes()
    with pytest.raises(InvalidArgument):
        manager.sync_weights(merge_and_sync=False)
    with pytest.raises(UnknownAdapter):
        manager.sync_weights(merge_and_sync=False, adapter_name='c')
    with pytest.raises(ValueError, match='adapter_name'):
        sampler.sample(PROMPT, GREEDY)
    with pytest.raises(ValueError, match='use_base_model'):
        sampler.sample(PROMPT, GREEDY, 'a', use_base_model=True)


def test_a_new_base_removes_the_adapters_of_the_old_base(trainer, sampler):
    """Replacing the base removes its adapters, whose version numbers are not used again."""
    manager = CheckpointEngineManager(trainer, sampler)
    manager.sync_weights(merge_and_sync=False)
    manager.sync_weights(merge_and_sync=True)
    with pytest.raises(UnknownToSampler):
        sampler.sample(PROMPT, GREEDY, 'policy')
    assert manager.sync_weights(merge_and_sync=False).version == 2


def test_corrupt_bytes_are_refused(trainer, sampler):
    """A state with one flipped bit is refused, and the sampler keeps its weights."""
    CheckpointEngineManager(trainer, sampler).sync_weights(merge_and_sync=False)
    before = scores(sampler)
    learn(trainer)
    for state in (trainer.export_weights(), trainer.export_base()):
        data = bytearray(state.data)
        data[len(data) // 2] ^= 1
        with pytest.raises(DigestMismatch):
            sampler.receive_weights(replace(state, data=memoryview(data)), adapter_name='policy')
    assert scores(sampler).tobytes() == before.tobytes()


def test_unsuitable_weights_are_refused(trainer, sampler, tiny_qwen3_dir):
    """Weights of another architecture, a base with an adapter's name and an adapter without a name are refused."""
    before = scores(sampler)
    foreign = TransformersModel(str(tiny_qwen3_dir))
    foreign.engine.create_full_adapter('whole')
    with pytest.raises(ValueError, match='weight'):
        sampler.receive_weights(foreign.export_weights())
    with pytest.raises(ValueError, match='adapter'):
        sampler.receive_weights(trainer.export_base(), adapter_name='policy')
    with pytest.raises(ValueError, match='empty'):
        sampler.receive_weights(trainer.export_weights())
    assert scores(sampler).tobytes() == before.tobytes()


def test_the_base_is_not_replaced_during_a_request(trainer, sampler):
    """Replacing the base during a stream raises SamplerBusy; an adapter can be synced at any time."""
    manager = CheckpointEngineManager(trainer, sampler)
    stream = sampler.sample_stream(PROMPT, GREEDY)
    next(stream)
    with pytest.raises(SamplerBusy):
        manager.sync_weights(merge_and_sync=True)
    assert manager.sync_weights(merge_and_sync=False).version == 1
    assert all(event.version == 0 for event in stream)
    assert manager.sync_weights(merge_and_sync=True).version == 1


def test_a_sampler_on_the_trainers_model_accepts_adapters_only(trainer, tiny_llama_dir):
    """A sampler that shares the trainer's model refuses to replace the base weights."""
    sampler = TorchSampler(str(tiny_llama_dir), model=trainer.engine.model)
    manager = CheckpointEngineManager(trainer, sampler)
    manager.sync_weights(merge_and_sync=False)
    assert scores(sampler).tobytes() == trained_scores(trainer).tobytes()
    with pytest.raises(ValueError, match='given'):
        manager.sync_weights(merge_and_sync=True)


def test_a_trainer_of_bf16_weights_syncs_its_base(tiny_llama_dir, sampler):
    """A float32 sampler receives the trainer's bfloat16 base weights in the first sync."""
    trainer = TransformersModel(str(tiny_llama_dir), mixed_precision='bf16')
    trainer.add_adapter_to_model('policy', LoraConfig(r=4, seed=1))
    manager = CheckpointEngineManager(trainer, sampler)
    assert [manager.sync_weights(merge_and_sync=False).base_size_bytes > 0 for _ in range(2)] == [True, False]
    sampler_of_bf16 = TorchSampler(str(tiny_llama_dir), {'dtype': 'bfloat16'})
    assert sampler_of_bf16.base_source == trainer.base_source != sampler.base_source
    state = trainer.export_base()
    plain = dict(AutoModelForCausalLM.from_pretrained(tiny_llama_dir, dtype='bfloat16').named_parameters())
    assert sampler.base_source.digest == state.manifest.digest
    for name, data in unpack_state(state.manifest, state.data).items():
        assert torch.equal(tensor_of(data), plain[name])


def test_unknown_platform_is_refused(trainer, sampler):
    """A ValueError names the unknown platform."""
    with pytest.raises(ValueError, match='NPU'):
        CheckpointEngineManager(trainer, sampler, 'NPU')
