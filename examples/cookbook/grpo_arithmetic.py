"""Teach a chat model to answer sums in a required form, with GRPO: `python -m examples.cookbook.grpo_arithmetic`.

A model and a sampler run in one process, and the sampler loads the model's adapter before every step. The torch
engine uses the model's base weights; vLLM loads a second copy. The expected answer to `7 + 2` is
`<answer>9</answer>`; every chat starts with one such example. The reward in [0, 1] is the mean of two parts: the answer
is a number in tags, and the number is correct. Held-out sums are answered every few steps, by sampling with fixed seeds
(`held_out_reward`) and by greedy decoding (`held_out_greedy_reward`). The curves contain no times, so that a seed
always gives the same curves on one machine.
"""

import random
import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

from examples.cookbook.recipe import Recipe, check_options, endless, run_recipe
from twinkle.hub import BUILT_IN_MODELS


@dataclass(frozen=True)
class Setting:
    """Sizes and rates."""

    model: str = BUILT_IN_MODELS[0]
    precision: Literal['no', 'bf16'] = 'no'
    engine: Literal['torch', 'vllm'] = 'torch'
    """Engine of the sampler."""
    steps: int = 8
    prompts: int = 4
    """Prompts per step."""
    completions: int = 8
    """Completions per prompt, which form a group."""
    updates: int = 2
    """Optimizer steps per sampled batch, each on a part of the groups."""
    max_tokens: int = 12
    """Maximum number of tokens per completion."""
    learning_rate: float = 5e-4
    lora_rank: int = 16
    largest: int = 9
    """Largest number in a sum."""
    held_out: int = 12
    """Number of held-out pairs; both orders of a pair are held out."""
    held_out_completions: int = 1
    """Completions per held-out prompt at each evaluation."""
    eval_every: int = 4
    """Steps between evaluations."""

    def __post_init__(self) -> None:
        count = self.prompts * self.completions
        if not 1 <= self.updates <= count:
            raise ValueError(
                f'--updates: must be 1 to {count}, the number of completions of a step, got {self.updates}'
            )


CPU = Setting()
GPU = Setting(
    precision='bf16', engine='vllm', steps=200, prompts=32, completions=16, largest=99, held_out=128, eval_every=10,
)  # fmt: skip

if __name__ == '__main__':
    check_options('grpo_arithmetic', __doc__, {'cpu': CPU, 'gpu': GPU})

from examples.cookbook.curves import Curves
from examples.cookbook.grpo import build_sampler, held_out_answers, log_rollouts, step_numbers
from twinkle.advantage import GRPOAdvantage
from twinkle.checkpoint_engine import CheckpointEngineManager
from twinkle.data_format import InputFeature, LoraConfig, SampleResponse, SamplingParams, pack_value
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.model import TransformersModel
from twinkle.reward import AnswerReward, TextReward
from twinkle.sampler import Sampler

EXAMPLE = [
    {'role': 'system', 'content': ' '},
    {'role': 'user', 'content': '2 + 2'},
    {'role': 'assistant', 'content': '<answer>4</answer>'},
]
"""One answered sum at the start of every chat."""
ANSWER = re.compile(r'<answer>(-?[0-9]+)</answer>')
SPLIT_SEED = 7
"""Seed of the split, so that the held-out sums do not depend on the seed of the run."""


def main() -> None:
    """Run the recipe."""
    run_recipe('grpo_arithmetic', __doc__, {'cpu': CPU, 'gpu': GPU}, train)


def train(recipe: Recipe[Setting]) -> None:
    """Sample, compute rewards and train in a loop, and record the curves."""
    setting = recipe.setting
    training, held_out = sums(setting)
    model = build_model(setting, seed=recipe.seed)
    batches = endless(DataLoader(training, batch_size=setting.prompts, shuffle=True, seed=recipe.seed, drop_last=True))
    plotted = ('held_out_reward', 'reward', 'train/approx_kl', 'train/clip_ratio', 'entropy')
    with (
        ExitStack() as stack,
        Curves(recipe, title='GRPO: sums in tags', total_steps=setting.steps + 1, plotted=plotted) as curves,
    ):
        sampler = build_sampler(model, setting.engine, lora_rank=setting.lora_rank, stack=stack)
        manager = CheckpointEngineManager(model=model, sampler=sampler)
        for step in range(setting.steps):
            version = manager.sync_weights(merge_and_sync=False).version
            numbers = evaluate(sampler, held_out, setting) if step % setting.eval_every == 0 else {}
            seed = recipe.seed * 100_000 + step
            groups = sample_groups(sampler, next(batches), setting, seed=seed)
            curves.record(**numbers, **learn(model, groups, setting, curves, version=version))
        manager.sync_weights(merge_and_sync=False)
        curves.record(**evaluate(sampler, held_out, setting))


class TaggedReward(TextReward):
    """1 if the completion contains a number in tags, otherwise 0."""

    def score(self, completion: str) -> float:
        return float(bool(ANSWER.search(completion)))


class SumReward(AnswerReward):
    """1 if the last number in tags is the sum, otherwise 0."""

    def score(self, completion: str, ground_truth: int) -> float:
        return float(ANSWER.findall(completion)[-1:] == [str(ground_truth)])


def sums(setting: Setting) -> tuple[Dataset, Dataset]:
    """Return the training sums and the held-out sums; both orders of a pair are in the same set."""
    numbers = range(1, setting.largest + 1)
    pairs = [(left, right) for left in numbers for right in numbers if left <= right]
    random.Random(SPLIT_SEED).shuffle(pairs)
    held_out, training = pairs[: setting.held_out], pairs[setting.held_out :]
    return Dataset(DatasetMeta(data=rows_of(training))), Dataset(DatasetMeta(data=rows_of(held_out)))


def rows_of(pairs: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """Return a chat for each order of each pair."""
    return [
        {
            'messages': [*EXAMPLE, {'role': 'user', 'content': f'{left} + {right}'}],
            'user_data': [pack_value('ground_truth', left + right)],
        }
        for pair in pairs
        for left, right in sorted({pair, pair[::-1]})
    ]


def build_model(setting: Setting, *, seed: int) -> TransformersModel:
    """Return the model with a new adapter."""
    model = TransformersModel(setting.model, mixed_precision=setting.precision)
    config = LoraConfig(r=setting.lora_rank, lora_alpha=2 * setting.lora_rank, seed=seed)
    model.add_adapter_to_model('default', config)
    model.set_optimizer('AdamW', lr=setting.learning_rate)
    model.set_loss('GRPOLoss', epsilon=0.2)
    model.add_metric('GRPOMetric', epsilon=0.2)
    return model


def sample_groups(sampler: Sampler, prompts: Sequence[Any], setting: Setting, *, seed: int) -> list[SampleResponse]:
    """Sample a group of completions for each prompt."""
    params = SamplingParams(max_tokens=setting.max_tokens, seed=seed)
    return sampler.sample(prompts, params, num_samples=setting.completions)


def score(features: Sequence[InputFeature]) -> dict[str, list[float]]:
    """Return the rewards of the completions by name; `total` is the mean of the other rewards."""
    accuracy, form = SumReward()(features), TaggedReward()(features)
    return {'accuracy': accuracy, 'format': form, 'total': [(a + f) / 2 for a, f in zip(accuracy, form, strict=True)]}


def learn(
    model: TransformersModel, responses: Sequence[SampleResponse], setting: Setting, curves: Curves, *, version: int
) -> dict[str, float]:
    """Log the sampled completions, and update the adapter on them; return the numbers of the step."""
    sequences = [sequence for response in responses for sequence in response.sequences]
    features = [sequence.new_input_feature for sequence in sequences]
    rewards = score(features)
    advantages = GRPOAdvantage()(rewards['total'], num_generations=setting.completions).tolist()
    log_rollouts(curves, responses, rewards, advantages)
    size = len(features) // setting.updates
    for begin in range(0, size * setting.updates, size):
        part = slice(begin, begin + size)
        model.forward_backward(features[part], advantages=advantages[part])
        model.clip_grad_and_step()
    return step_numbers(model, sequences, rewards, version=version)


def evaluate(sampler: Sampler, held_out: Dataset, setting: Setting) -> dict[str, float]:
    """Return the mean rewards of sampled and of greedy answers to the held-out sums."""
    params = SamplingParams(max_tokens=setting.max_tokens)
    sampled, greedy = held_out_answers(sampler, held_out, params, completions=setting.held_out_completions)
    rewards, greedy_rewards = score(sampled), score(greedy)
    return {
        'held_out_reward': fmean(rewards['total']),
        'held_out_accuracy': fmean(rewards['accuracy']),
        'held_out_format': fmean(rewards['format']),
        'held_out_greedy_reward': fmean(greedy_rewards['total']),
    }


if __name__ == '__main__':
    main()
