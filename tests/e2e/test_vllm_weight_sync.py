"""Weights are transferred from a trainer in this process to vLLM: adapters, merged models and the base model."""

from pathlib import Path

import numpy as np
import pytest

from fixtures.tiny_model import build_tiny_model
from twinkle.checkpoint_engine import CheckpointEngineManager
from twinkle.data_format import InputFeature, LoraConfig, SamplingParams
from twinkle.model import TransformersModel
from twinkle.sampler import UnknownAdapter, vLLMSampler

pytestmark = pytest.mark.timeout(300)
LENGTH = 80
"""Tokens of the sequence. It spans more than two cache blocks of vLLM, so that outdated cache entries are detected."""
FEATURE = InputFeature(input_ids=list(range(5, 5 + LENGTH)), labels=list(range(6, 6 + LENGTH)))


def scores(sampler: vLLMSampler, **options: bool) -> np.ndarray:
    """Return the log-probabilities of the sequence, and then sample from it, so that vLLM caches the sequence."""
    ids = list(FEATURE['input_ids'])
    (scored,) = sampler.sample(ids, SamplingParams(max_tokens=0), **options)
    sampler.sample(ids, SamplingParams(max_tokens=1, temperature=0), **options)
    return np.array(scored.prompt_logprobs[1:], np.float32)


def trainer_scores(trainer: TransformersModel, **options: bool) -> np.ndarray:
    """Return the trainer's log-probabilities of the sequence."""
    return np.asarray(trainer.forward_only(FEATURE, **options)['logps'][0], np.float32)[:-1]


@pytest.mark.slow
@pytest.mark.parametrize('tensor_parallel_size', [1, 2])
def test_vllm_agrees_with_the_trainer_after_every_sync(tmp_path: Path, tensor_parallel_size: int) -> None:
    """Samples of vLLM agree with the trainer within 1e-4 after each kind of sync, and use no old cache entries."""
    folder = build_tiny_model(tmp_path / 'model')
    trainer = TransformersModel(str(folder))
    trainer.add_adapter_to_model('policy', LoraConfig(r=4, seed=1))
    trainer.set_optimizer('AdamW', lr=2e-2)
    arguments = {'max_model_len': 256, 'max_lora_rank': 8, 'max_loras': 2, 'tensor_parallel_size': tensor_parallel_size}
    with vLLMSampler(str(folder), arguments) as sampler:
        manager = CheckpointEngineManager(trainer, sampler)
        syncs = [(False, 1, False), (False, 2, False), (True, 1, False), (True, 2, False), (False, 3, True)]
        for merge_and_sync, version, is_base_sent in syncs:
            trainer.forward_backward(FEATURE)
            trainer.clip_grad_and_step()
            synced = manager.sync_weights(merge_and_sync)
            assert (synced.version, synced.base_size_bytes > 0) == (version, is_base_sent)
            np.testing.assert_allclose(scores(sampler), trainer_scores(trainer), atol=1e-4)
            (response,) = sampler.sample([5, 6, 7], SamplingParams(max_tokens=2, ignore_eos=True))
            assert [span.version for span in response.sequences[0].version_spans] == [version]
            if merge_and_sync:
                with pytest.raises(UnknownAdapter):
                    sampler.sample([5], None, 'policy')
        np.testing.assert_allclose(
            scores(sampler, use_base_model=True), trainer_scores(trainer, disable_lora=True), atol=1e-4
        )
