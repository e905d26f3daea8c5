"""What the recipes of GRPO share around their tasks: what samples, how answers are drawn, what a step reports."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

from twinkle.data_format import InputFeature, SampledSequence, SamplingParams
from twinkle.dataset import Dataset
from twinkle.metric import CompletionRewardMetric
from twinkle.model import TransformersModel
from twinkle.rollout import staleness_of
from twinkle.sampler import Sampler, TorchSampler, vLLMSampler

DIAGNOSTICS = ('train/approx_kl', 'train/token_ratio_mean', 'train/token_ratio_max', 'train/clip_ratio', 'grad_norm')
"""Of what the trainer reports; none of them is a time, so a seed gives the same curve each time."""


def build_sampler(model: TransformersModel, engine: str, *, lora_rank: int, stack: ExitStack) -> Sampler:
    """Return what samples; `stack` closes it.

    Args:
        model: the trainer; the torch engine samples with its very weights, on its device.
        engine: 'torch' or 'vllm', which loads weights of its own.
        lora_rank: of the adapter.
        stack: of the run.
    """
    if engine == 'torch':
        return TorchSampler(model.model_id, model=model.engine.model)
    arguments = {'max_model_len': 256, 'max_lora_rank': lora_rank, 'max_loras': 2}
    if model.engine.model.device.type == 'cuda':
        # The trainer is on the same GPU.
        arguments['gpu_memory_utilization'] = 0.5
    return stack.enter_context(vLLMSampler(model.model_id, arguments))


def held_out_answers(
    sampler: Sampler, held_out: Dataset, params: SamplingParams, *, completions: int
) -> tuple[list[InputFeature], list[InputFeature]]:
    """Answer what is held out: with seeds that never change, and by the likeliest tokens.

    Args:
        sampler: with the weights that are judged.
        held_out: prompts.
        params: as in training.
        completions: to draw of each prompt.
    """
    drawn = [
        # One call each, since prompts of one call share their random numbers.
        *(
            sampler.sample(prompt, replace(params, seed=index), num_samples=completions)
            for index, prompt in enumerate(held_out)
        )
    ]
    greedy = sampler.sample(list(held_out), replace(params, temperature=0.0))
    return (
        [sequence.new_input_feature for responses in drawn for one in responses for sequence in one.sequences],
        [sequence.new_input_feature for response in greedy for sequence in response.sequences],
    )


def step_numbers(
    model: TransformersModel,
    sequences: Sequence[SampledSequence],
    rewards: Mapping[str, list[float]],
    *,
    version: int,
) -> dict[str, float]:
    """Return a step's numbers for the curves.

    Args:
        model: which learned from `sequences`.
        sequences: what was sampled.
        rewards: of each by name; 'total' is what was learned from.
        version: of the trainer's weights when it was sampled.
    """
    earned = CompletionRewardMetric()
    earned.accumulate(rewards=rewards, completion_lengths=[len(sequence.tokens) for sequence in sequences])
    trained = model.calculate_metric()
    return {
        'reward': sum(rewards['total']) / len(sequences),
        **earned.calculate(),
        'entropy': -trained['train/mean_old_logp'],
        'staleness': max(staleness_of(sequence, version=version) for sequence in sequences),
        **{name: trained[name] for name in DIAGNOSTICS},
    }
