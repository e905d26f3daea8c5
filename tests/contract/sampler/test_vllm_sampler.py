"""Contract tests of `vLLMSampler`, compared with `TorchSampler`."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fixtures.sampled import LORA, lora_state, lora_tensors
from twinkle.checkpoint_engine import pack_state, write_peft_folder
from twinkle.data_format import StopReason, TensorData
from twinkle.sampler import TorchSampler, UnknownAdapter, vLLMSampler
from twinkle.sampler.errors import BaseDoesNotFit, ContextExceeded, SleepUnavailable
from twinkle.sampler.vllm import folder_tensors

PROMPTS = [[1, 40, 41, 42], [1, 50, 51, 52, 53]]
GREEDY = {'max_tokens': 6, 'temperature': 0, 'ignore_eos': True, 'logprobs': 1}
ARGUMENTS = {'max_num_seqs': 8, 'max_loras': 2, 'max_lora_rank': 8, 'kv_cache_memory_bytes': 1 << 26}


@pytest.fixture(scope='module')
def sampler(tiny_llama_dir: Path) -> Iterator[vLLMSampler]:
    """One vLLM sampler for all tests."""
    with vLLMSampler(str(tiny_llama_dir), ARGUMENTS) as vllm_sampler:
        yield vllm_sampler


@pytest.fixture
def torch_sampler(tiny_llama_dir: Path) -> TorchSampler:
    """The reference sampler."""
    return TorchSampler(str(tiny_llama_dir))


def assert_same_results(one, other) -> None:
    """Assert that two samplers gave the same results, with log-probabilities that differ by at most about 1e-4."""
    for left, right in zip(one, other, strict=True):
        assert left.prompt_token_ids == right.prompt_token_ids
        for first, second in zip(left.sequences, right.sequences, strict=True):
            assert (first.tokens, first.decoded, first.stop_reason) == (
                second.tokens,
                second.decoded,
                second.stop_reason,
            )
            assert first.version_spans == second.version_spans
            np.testing.assert_allclose(
                [entry[0][1] for entry in first.logprobs], [entry[0][1] for entry in second.logprobs], atol=1e-4
            )
            feature, second_feature = first.new_input_feature, second.new_input_feature
            assert list(feature['input_ids']) == list(second_feature['input_ids'])
            np.testing.assert_allclose(feature['old_logps'], second_feature['old_logps'], atol=1e-4)


def test_both_samplers_give_the_same_results(sampler, torch_sampler, tmp_path):
    """Both samplers agree for the base model, an adapter from a folder, a new adapter and a received adapter."""
    assert_same_results(sampler.sample(PROMPTS, GREEDY), torch_sampler.sample(PROMPTS, GREEDY))
    write_peft_folder(tmp_path / 'peft', lora_tensors(1), LORA, base_model='tiny')
    for each in (sampler, torch_sampler):
        each.add_adapter_to_sampler('folder', tmp_path / 'peft')
        each.add_adapter_to_sampler('fresh', LORA)
        assert each.receive_weights(lora_state(2), adapter_name='policy') == 1
        assert each.receive_weights(lora_state(3), adapter_name='policy') == 2
    for name in ('folder', 'fresh', 'policy', ''):
        assert_same_results(sampler.sample(PROMPTS, GREEDY, name), torch_sampler.sample(PROMPTS, GREEDY, name))
    base = sampler.sample(PROMPTS, GREEDY, use_base_model=True)
    assert base[0].sequences[0].version_spans[0].version == 0
    assert base[0].sequences[0].tokens == sampler.sample(PROMPTS, GREEDY, 'fresh')[0].sequences[0].tokens


def test_prompts_are_scored_without_new_tokens(sampler, torch_sampler):
    """A call with max_tokens 0 gives log-probabilities of the prompt within 1e-4 of the reference."""
    one, other = [each.sample(PROMPTS, {'max_tokens': 0}, use_base_model=True) for each in (sampler, torch_sampler)]
    for first, second in zip(one, other, strict=True):
        assert first.sequences[0].tokens == []
        assert first.prompt_logprobs[0] is None
        np.testing.assert_allclose(first.prompt_logprobs[1:], second.prompt_logprobs[1:], atol=1e-4)


def test_stream_yields_tokens_and_one_end(sampler):
    """A stream yields the tokens of `sample` and one final event, and can be closed early."""
    events = list(sampler.sample_stream(PROMPTS[0], GREEDY, use_base_model=True))
    whole = sampler.sample(PROMPTS[0], GREEDY, use_base_model=True)[0].sequences[0]
    assert [token for event in events for token in event.tokens] == whole.tokens
    assert [event.stop_reason for event in events if event.stop_reason] == [StopReason.LENGTH]
    stream = sampler.sample_stream(PROMPTS[0], {**GREEDY, 'max_tokens': 400}, use_base_model=True)
    next(stream)
    stream.close()


@pytest.fixture
def separate_sampler(tiny_llama_dir: Path) -> Iterator[vLLMSampler]:
    """A separate sampler whose base weights a test may replace."""
    with vLLMSampler(str(tiny_llama_dir), ARGUMENTS) as vllm_sampler:
        yield vllm_sampler


@pytest.mark.slow
def test_received_base_is_used_and_restored_bitwise(separate_sampler, tiny_llama_dir):
    """Tokens have the version of a received base; restoring the old weights restores all log-probabilities."""
    sampler = separate_sampler
    whole = folder_tensors(str(tiny_llama_dir))
    before = sampler.sample(PROMPTS, GREEDY, use_base_model=True)
    scaled = {name: TensorData.from_numpy(1.3 * tensor.to_numpy()) for name, tensor in whole.items()}
    version = sampler.receive_weights(pack_state(scaled, base_model='tiny', lora_config=None))
    other = sampler.sample(PROMPTS, GREEDY)
    assert other[0].sequences[0].version_spans[0].version == version
    assert other[0].sequences[0].tokens != before[0].sequences[0].tokens
    assert sampler.base_source.digest
    with pytest.raises(BaseDoesNotFit):
        sampler.receive_weights(pack_state(dict(list(whole.items())[1:]), base_model='tiny', lora_config=None))
    assert sampler.sample(PROMPTS, GREEDY)[0].sequences[0].tokens == other[0].sequences[0].tokens
    sampler.receive_weights(pack_state(whole, base_model='tiny', lora_config=None))
    again = sampler.sample(PROMPTS, GREEDY)
    assert [item.sequences[0].logprobs for item in again] == [item.sequences[0].logprobs for item in before]


def test_refusals_do_not_affect_the_sampler(sampler):
    """Unknown adapters, sleep on a CPU, and prompts that are too long are refused without side effects."""
    with pytest.raises(UnknownAdapter):
        sampler.sample(PROMPTS, GREEDY, 'unknown')
    with pytest.raises(ContextExceeded):
        sampler.sample([PROMPTS[0], [1] * 600], GREEDY, use_base_model=True)
    with pytest.raises(SleepUnavailable):
        sampler.sleep()
    sampler.wake_up()
    sampler.reset_prefix_cache()
    assert len(sampler.sample(PROMPTS, GREEDY, num_samples=3, use_base_model=True)[0].sequences) == 3
