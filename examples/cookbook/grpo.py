"""Parts shared by the GRPO recipes: the sampler, the evaluation, and the logged rollouts and numbers."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

from examples.cookbook.curves import Curves
from twinkle.data_format import InputFeature, SampledSequence, SampleResponse, SamplingParams
from twinkle.dataset import Dataset
from twinkle.metric import CompletionRewardMetric
from twinkle.model import TransformersModel
from twinkle.rollout import staleness_of
from twinkle.sampler import Sampler, TorchSampler, vLLMSampler

DIAGNOSTICS = ('train/approx_kl', 'train/token_ratio_mean', 'train/token_ratio_max', 'train/clip_ratio', 'grad_norm')
"""Recorded metrics of the training; no times, so that a seed always gives the same curves on one machine."""


def build_sampler(model: TransformersModel, engine: str, *, lora_rank: int, stack: ExitStack) -> Sampler:
    """Return the sampler; `stack` closes a vLLM sampler.

    Args:
        model: Model in training. The torch engine shares its base weights and its device.
        engine: 'torch', or 'vllm', which loads a second copy of the weights.
        lora_rank: LoRA rank of the adapter.
        stack: Exit stack of the run.
    """
    if engine == 'torch':
        return TorchSampler(model.model_id, model=model.engine.model)
    arguments = {'max_model_len': 256, 'max_lora_rank': lora_rank, 'max_loras': 2}
    if model.engine.model.device.type == 'cuda':
        # The model in training uses the same GPU.
        arguments['gpu_memory_utilization'] = 0.5
    return stack.enter_context(vLLMSampler(model.model_id, arguments))


def held_out_answers(
    sampler: Sampler, held_out: Dataset, params: SamplingParams, *, completions: int
) -> tuple[list[InputFeature], list[InputFeature]]:
    """Answer the held-out prompts by sampling with fixed seeds and by greedy decoding; return the features of both.

    Args:
        sampler: Sampler with the weights to evaluate.
        held_out: Held-out prompts.
        params: Sampling parameters of the training.
        completions: Sampled completions per prompt.
    """
    sampled = [
        # One call per prompt, because the prompts of a call share their random numbers.
        *(
            sampler.sample(prompt, replace(params, seed=index), num_samples=completions)
            for index, prompt in enumerate(held_out)
        )
    ]
    greedy = sampler.sample(list(held_out), replace(params, temperature=0.0))
    return (
        [sequence.new_input_feature for group in sampled for response in group for sequence in response.sequences],
        [sequence.new_input_feature for response in greedy for sequence in response.sequences],
    )


def log_rollouts(
    curves: Curves, responses: Sequence[SampleResponse], rewards: Mapping[str, list[float]], advantages: Sequence[float]
) -> None:
    """Log the completions of a step. The reward 'total' is used for training, and the other rewards are its parts."""
    parts = {name: values for name, values in rewards.items() if name != 'total'}
    curves.log_rollouts(responses, rewards=rewards['total'], reward_parts=parts, advantages=advantages)


def step_numbers(
    model: TransformersModel,
    sequences: Sequence[SampledSequence],
    rewards: Mapping[str, list[float]],
    *,
    version: int,
) -> dict[str, float]:
    """Return the numbers of a step for the curves.

    Args:
        model: Model that was trained on `sequences`.
        sequences: Sampled sequences.
        rewards: Rewards of the sequences by name; 'total' is the training reward.
        version: Version of the trained weights at the time of sampling.
    """
    metric = CompletionRewardMetric()
    metric.accumulate(rewards=rewards, completion_lengths=[len(sequence.tokens) for sequence in sequences])
    metrics = model.calculate_metric()
    return {
        'reward': sum(rewards['total']) / len(sequences),
        **metric.calculate(),
        'entropy': -metrics['train/mean_old_logp'],
        'staleness': max(staleness_of(sequence, version=version) for sequence in sequences),
        **{name: metrics[name] for name in DIAGNOSTICS},
    }
