"""Teach a chat model the countdown game, with the GRPO loss: `python -m examples.cookbook.grpo_countdown`.

A game has two numbers and a target: the expected answer to `Make 8 of 3, 5` is `<answer>3 + 5</answer>`. The shaped
reward in [0, 1] is the mean of three parts: the answer is in tags, it uses each number once, and it reaches the target
(this part is `CountDownAccuracy`). Advantages are relative to the rest of the group (RLOO), and the upper clip range is
wider than the lower one (DAPO). Held-out games are played every few steps; their mean reward is `held_out_reward`. The
curves contain no times, so that a seed always gives the same curves on one machine.
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
    steps: int = 6
    prompts: int = 4
    """Prompts per step."""
    completions: int = 8
    """Completions per prompt, which form a group."""
    updates: int = 2
    """Optimizer steps per sampled batch, each on a part of the groups."""
    max_tokens: int = 14
    """Maximum number of tokens per completion."""
    learning_rate: float = 1e-3
    lora_rank: int = 16
    largest: int = 9
    """Largest number in a game."""
    sums: float = 0.5
    """Probability that the target of a game is the sum; otherwise the target is the difference."""
    held_out: int = 12
    """Number of held-out pairs; both orders of a pair are held out."""
    held_out_completions: int = 1
    """Completions per held-out prompt at each evaluation."""
    eval_every: int = 3
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
    check_options('grpo_countdown', __doc__, {'cpu': CPU, 'gpu': GPU})

from examples.cookbook.curves import Curves
from examples.cookbook.grpo import build_sampler, held_out_answers, log_rollouts, step_numbers
from twinkle.advantage import RLOOAdvantage
from twinkle.checkpoint_engine import CheckpointEngineManager
from twinkle.data_format import InputFeature, LoraConfig, SampleResponse, SamplingParams, pack_value
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.model import TransformersModel
from twinkle.reward import AnswerReward, CountDownAccuracy, TextReward
from twinkle.sampler import Sampler

EXAMPLE = [
    {'role': 'system', 'content': ' '},
    {'role': 'user', 'content': 'Make 8 of 3, 5'},
    {'role': 'assistant', 'content': '<answer>3 + 5</answer>'},
]
"""One answered game at the start of every chat."""
ANSWER = re.compile(r'<answer>([^<]*)</answer>')
SPLIT_SEED = 7
"""Seed of the split, so that the held-out games do not depend on the seed of the run."""


def main() -> None:
    """Run the recipe."""
    run_recipe('grpo_countdown', __doc__, {'cpu': CPU, 'gpu': GPU}, train)


def train(recipe: Recipe[Setting]) -> None:
    """Sample, compute rewards and train in a loop, and record the curves."""
    setting = recipe.setting
    training, held_out = games(setting)
    model = build_model(setting, seed=recipe.seed)
    batches = endless(DataLoader(training, batch_size=setting.prompts, shuffle=True, seed=recipe.seed, drop_last=True))
    plotted = ('held_out_reward', 'reward', 'train/approx_kl', 'train/clip_ratio', 'entropy')
    with (
        ExitStack() as stack,
        Curves(recipe, title='GRPO: the countdown game', total_steps=setting.steps + 1, plotted=plotted) as curves,
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
    """1 if the completion contains an answer in tags, otherwise 0."""

    def score(self, completion: str) -> float:
        return float(bool(ANSWER.search(completion)))


class NumbersReward(AnswerReward):
    """1 if the answer uses each number of the game once, regardless of the result, otherwise 0."""

    def score(self, completion: str, ground_truth: list[int]) -> float:
        answers = ANSWER.findall(completion)
        used = [int(number) for number in re.findall('[0-9]+', answers[-1])] if answers else []
        return float(sorted(used) == sorted(ground_truth))


def games(setting: Setting) -> tuple[Dataset, Dataset]:
    """Return the training games and the held-out games; both orders of a pair are in the same set."""
    numbers = range(1, setting.largest + 1)
    pairs = [(left, right) for left in numbers for right in numbers if left <= right]
    rng = random.Random(SPLIT_SEED)
    rng.shuffle(pairs)
    held_out, training = pairs[: setting.held_out], pairs[setting.held_out :]
    return (
        Dataset(DatasetMeta(data=rows_of(training, rng, setting))),
        Dataset(DatasetMeta(data=rows_of(held_out, rng, setting))),
    )


def rows_of(pairs: Sequence[tuple[int, int]], rng: random.Random, setting: Setting) -> list[dict[str, Any]]:
    """Return a game for each order of each pair; its target is the sum or the absolute difference."""
    rows: list[dict[str, Any]] = []
    for left, right in [ordered for pair in pairs for ordered in sorted({pair, pair[::-1]})]:
        target = left + right if rng.random() < setting.sums else abs(left - right)
        question = {'role': 'user', 'content': f'Make {target} of {left}, {right}'}
        user_data = [pack_value('target', target), pack_value('nums', [left, right])]
        rows.append({'messages': [*EXAMPLE, question], 'user_data': user_data})
    return rows


def build_model(setting: Setting, *, seed: int) -> TransformersModel:
    """Return the model with a new adapter."""
    model = TransformersModel(setting.model, mixed_precision=setting.precision)
    config = LoraConfig(r=setting.lora_rank, lora_alpha=2 * setting.lora_rank, seed=seed)
    model.add_adapter_to_model('default', config)
    model.set_optimizer('AdamW', lr=setting.learning_rate)
    model.set_loss('GRPOLoss', epsilon=0.2, epsilon_high=0.28)
    model.add_metric('GRPOMetric', epsilon=0.2, epsilon_high=0.28)
    return model


def sample_groups(sampler: Sampler, prompts: Sequence[Any], setting: Setting, *, seed: int) -> list[SampleResponse]:
    """Sample a group of completions for each prompt."""
    params = SamplingParams(max_tokens=setting.max_tokens, seed=seed)
    return sampler.sample(prompts, params, num_samples=setting.completions)


def score(features: Sequence[InputFeature]) -> dict[str, list[float]]:
    """Return the rewards of the completions by name; `total` is the mean of the other rewards."""
    parts = {
        'accuracy': CountDownAccuracy()(features),
        'numbers': NumbersReward('nums')(features),
        'format': TaggedReward()(features),
    }
    return {**parts, 'total': [fmean(values) for values in zip(*parts.values(), strict=True)]}


def learn(
    model: TransformersModel, responses: Sequence[SampleResponse], setting: Setting, curves: Curves, *, version: int
) -> dict[str, float]:
    """Log the sampled completions, and update the adapter on them; return the numbers of the step."""
    sequences = [sequence for response in responses for sequence in response.sequences]
    features = [sequence.new_input_feature for sequence in sequences]
    rewards = score(features)
    advantages = RLOOAdvantage()(rewards['total'], num_generations=setting.completions).tolist()
    log_rollouts(curves, responses, rewards, advantages)
    size = len(features) // setting.updates
    for begin in range(0, size * setting.updates, size):
        part = slice(begin, begin + size)
        model.forward_backward(features[part], advantages=advantages[part])
        model.clip_grad_and_step()
    return step_numbers(model, sequences, rewards, version=version)


def evaluate(sampler: Sampler, held_out: Dataset, setting: Setting) -> dict[str, float]:
    """Return the mean rewards of sampled and of greedy answers to the held-out games."""
    params = SamplingParams(max_tokens=setting.max_tokens)
    sampled, greedy = held_out_answers(sampler, held_out, params, completions=setting.held_out_completions)
    rewards, greedy_rewards = score(sampled), score(greedy)
    return {
        'held_out_reward': fmean(rewards['total']),
        'held_out_accuracy': fmean(rewards['accuracy']),
        'held_out_numbers': fmean(rewards['numbers']),
        'held_out_format': fmean(rewards['format']),
        'held_out_greedy_reward': fmean(greedy_rewards['total']),
    }


if __name__ == '__main__':
    main()
