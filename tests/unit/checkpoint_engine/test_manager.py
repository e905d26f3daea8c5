"""Weights from a trainer of this process into a sampler of this process."""

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
    """A trainer whose adapter 'policy' has learned something."""
    trainer = TransformersModel(str(tiny_llama_dir))
    trainer.add_adapter_to_model('policy', LoraConfig(r=4, lora_alpha=16, seed=1))
    trainer.set_optimizer('AdamW', lr=2e-2)
    learn(trainer)
    return trainer


@pytest.fixture
def sampler(tiny_llama_dir: Path) -> TorchSampler:
    """A sampler with a model of its own."""
    return TorchSampler(str(tiny_llama_dir))


def learn(trainer: TransformersModel, adapter_name: str | None = None) -> None:
    """Take one step."""
    trainer.forward_backward(FEATURE, adapter_name=adapter_name)
    trainer.clip_grad_and_step(adapter_name=adapter_name)


def scores(sampler: TorchSampler, adapter_name: str = '', **options) -> np.ndarray:
    """Return the log-probabilities of the tokens of `FEATURE`, the first left out."""
    params = SamplingParams(max_tokens=0)
    (response,) = sampler.sample(list(FEATURE['input_ids']), params, adapter_name, **options)
    return np.array(response.prompt_logprobs[1:], np.float32)


def trained_scores(trainer: TransformersModel, **options) -> np.ndarray:
    """Return what the trainer gives the same tokens."""
    return np.asarray(trainer.forward_only(FEATURE, **options)['logps'][0], np.float32)[:-1]


def merged_by_peft(trainer: TransformersModel, folder: Path) -> torch.nn.Module:
    """Return the base model with the trainer's adapter merged in by peft."""
    config = peft.LoraConfig(r=4, lora_alpha=16, target_modules='all-linear', task_type='CAUSAL_LM')
    return build_peft_model(folder, config, trainer.get_state_dict()).merge_and_unload()


def test_a_synced_adapter_gives_the_trainer_s_bits(trainer, sampler):
    """After every step, sampler and trainer agree to the bit, and tokens carry the version."""
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
    """Carries weights through a file, as a program of one's own may; it can spoil them on the way."""

    def __init__(self, path: Path, *, is_spoiling: bool = False) -> None:
        self.path = path
        self.is_spoiling = is_spoiling
        self.carried: list[str] = []

    def carry(self, state: PackedState, receiver: WeightReceiver, *, adapter_name: str = '') -> int:
        """Write the state, read it back, and hand it over."""
        self.path.write_bytes(bytes(state.data))
        content = bytearray(self.path.read_bytes())
        content[-1] ^= self.is_spoiling
        self.carried.append(adapter_name)
        return receiver.receive_weights(
            replace(state, data=memoryview(content).toreadonly()), adapter_name=adapter_name
        )


def test_weights_may_be_carried_in_a_way_of_one_s_own(trainer, sampler, tmp_path):
    """What went through a file gives the trainer's bits; what it spoiled is refused, and nothing changes."""
    engine = FileEngine(tmp_path / 'weights')
    CheckpointEngineManager(trainer, sampler, engine=engine).sync_weights(merge_and_sync=False)
    assert engine.carried == ['policy']
    before = scores(sampler).tobytes()
    assert before == trained_scores(trainer).tobytes()
    learn(trainer)
    spoiling = CheckpointEngineManager(trainer, sampler, engine=FileEngine(tmp_path / 'weights', is_spoiling=True))
    with pytest.raises(DigestMismatch):
        spoiling.sync_weights(merge_and_sync=False)
    assert scores(sampler).tobytes() == before


def test_merged_weights_are_those_of_peft(trainer, sampler, tiny_llama_dir):
    """Every base tensor becomes what peft's merge makes of it, and the completions follow."""
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


def test_merged_weights_give_way_to_the_base_and_an_adapter(trainer, sampler):
    """What was merged is taken back once; later syncs bring the adapter alone."""
    manager = CheckpointEngineManager(trainer, sampler)
    whole = manager.sync_weights(merge_and_sync=True)
    sizes = [manager.sync_weights(merge_and_sync=False).base_size_bytes for _ in range(3)]
    assert sizes == [whole.size_bytes, 0, 0]
    assert scores(sampler).tobytes() == trained_scores(trainer).tobytes()
    assert scores(sampler, use_base_model=True).tobytes() == trained_scores(trainer, disable_lora=True).tobytes()


def test_another_base_is_replaced_before_the_adapter(trainer, tmp_path):
    """A sampler that was loaded from another folder gets the trainer's base, to the bit, and only once."""
    sampler = TorchSampler(str(build_tiny_model(tmp_path / 'other', seed=9)))
    manager = CheckpointEngineManager(trainer, sampler)
    assert manager.sync_weights(merge_and_sync=False).base_size_bytes > 0
    assert manager.sync_weights(merge_and_sync=False).base_size_bytes == 0
    assert scores(sampler).tobytes() == trained_scores(trainer).tobytes()


def test_weights_trained_whole_are_synced_whole(tiny_llama_dir, sampler):
    """A run that trains the base itself brings every tensor, whichever way is asked for."""
    trainer = TransformersModel(str(tiny_llama_dir))
    trainer.engine.create_full_adapter('whole', ('mlp',))
    trainer.set_optimizer('AdamW', lr=1e-2)
    manager = CheckpointEngineManager(trainer, sampler)
    for version, merge_and_sync in ((1, True), (2, False)):
        learn(trainer)
        synced = manager.sync_weights(merge_and_sync)
        assert (synced.version, synced.adapter_name, synced.base_size_bytes) == (version, '', 0)
        assert scores(sampler).tobytes() == trained_scores(trainer).tobytes()


def test_several_adapters_are_named(tiny_llama_dir, sampler):
    """With two of them neither trainer nor sampler guesses which is meant, and neither disturbs the other."""
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
    with pytest.raises(ValueError, match='say which'):
        sampler.sample(PROMPT, GREEDY)
    with pytest.raises(ValueError, match='use_base_model'):
        sampler.sample(PROMPT, GREEDY, 'a', use_base_model=True)


def test_a_new_base_forgets_adapters_of_the_old_one(trainer, sampler):
    """An adapter is never served on a base that it was not made for, and its numbers are not used again."""
    manager = CheckpointEngineManager(trainer, sampler)
    manager.sync_weights(merge_and_sync=False)
    manager.sync_weights(merge_and_sync=True)
    with pytest.raises(UnknownToSampler):
        sampler.sample(PROMPT, GREEDY, 'policy')
    assert manager.sync_weights(merge_and_sync=False).version == 2


def test_bytes_that_changed_on_the_way_are_refused(trainer, sampler):
    """One flipped bit, and the sampler goes on with what it had."""
    CheckpointEngineManager(trainer, sampler).sync_weights(merge_and_sync=False)
    before = scores(sampler)
    learn(trainer)
    for state in (trainer.export_weights(), trainer.export_base()):
        data = bytearray(state.data)
        data[len(data) // 2] ^= 1
        with pytest.raises(DigestMismatch):
            sampler.receive_weights(replace(state, data=memoryview(data)), adapter_name='policy')
    assert scores(sampler).tobytes() == before.tobytes()


def test_weights_that_do_not_fit_change_nothing(trainer, sampler, tiny_qwen3_dir):
    """States of another architecture, parts of a model, and states under a wrong name are refused."""
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


def test_the_base_is_not_replaced_under_a_request(trainer, sampler):
    """An open stream keeps the weights it began with; an adapter may come at any time."""
    manager = CheckpointEngineManager(trainer, sampler)
    stream = sampler.sample_stream(PROMPT, GREEDY)
    next(stream)
    with pytest.raises(SamplerBusy):
        manager.sync_weights(merge_and_sync=True)
    assert manager.sync_weights(merge_and_sync=False).version == 1
    assert all(event.version == 0 for event in stream)
    assert manager.sync_weights(merge_and_sync=True).version == 1


def test_a_sampler_on_the_trainer_s_model_takes_adapters_only(trainer, tiny_llama_dir):
    """Sharing the base is fine until somebody wants it replaced, which would change the trainer's."""
    sampler = TorchSampler(str(tiny_llama_dir), model=trainer.engine.model)
    manager = CheckpointEngineManager(trainer, sampler)
    manager.sync_weights(merge_and_sync=False)
    assert scores(sampler).tobytes() == trained_scores(trainer).tobytes()
    with pytest.raises(ValueError, match='given'):
        manager.sync_weights(merge_and_sync=True)


def test_a_trainer_of_bf16_weights_syncs_its_base(tiny_llama_dir, sampler):
    """The sampler loaded the same folder in float32, so that its base is another one until the first sync."""
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
    """Only what means something is taken."""
    with pytest.raises(ValueError, match='NPU'):
        CheckpointEngineManager(trainer, sampler, 'NPU')
