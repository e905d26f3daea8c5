"""Teach a chat model to answer sums in a required form, by GRPO: `python -m examples.cookbook.grpo_arithmetic`.

One process, two models: a trainer, and a sampler that gets the trainer's adapter before every step. `7 + 2` is to be
answered by `<answer>9</answer>`, as one example in the chat shows. Half of the reward is for a number in its tags, half
for the right one, so it lies in [0, 1]. Sums are split once: those held out are never trained on, and answered every
few steps, drawn as in training with seeds of their own (`held_out_reward`) and by the likeliest tokens
(`held_out_greedy_reward`). Nothing here reads a clock, so a seed gives the same curve each time.
"""

import random
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from examples.cookbook.curves import Curves
from examples.cookbook.recipe import Recipe, read_recipe
from twinkle.advantage import GRPOAdvantage
from twinkle.checkpoint_engine import CheckpointEngineManager
from twinkle.data_format import InputFeature, LoraConfig, SampleResponse, SamplingParams, pack_value
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.hub import BUILT_IN_MODELS
from twinkle.metric import CompletionRewardMetric
from twinkle.model import TransformersModel
from twinkle.reward import AnswerReward, TextReward
from twinkle.rollout import staleness_of
from twinkle.sampler import Sampler, TorchSampler, vLLMSampler

EXAMPLE = [
    {'role': 'system', 'content': ' '},
    {'role': 'user', 'content': '2 + 2'},
    {'role': 'assistant', 'content': '<answer>4</answer>'},
]
"""Every chat begins with one sum that is answered."""
ANSWER = re.compile(r'<answer>(-?[0-9]+)</answer>')
DIAGNOSTICS = ('train/approx_kl', 'train/token_ratio_mean', 'train/token_ratio_max', 'train/clip_ratio', 'grad_norm')
"""Of what the trainer reports; none of them is a time, so a seed gives the same curve each time."""
SPLIT_SEED = 7
"""Which sums are held out does not depend on the run's seed."""


@dataclass(frozen=True)
class Setting:
    """Sizes and rates."""

    model: str = BUILT_IN_MODELS[0]
    engine: str = 'torch'
    """What samples: 'torch' or 'vllm'."""
    steps: int = 8
    prompts: int = 4
    """A step."""
    completions: int = 8
    """Of each prompt; their rewards are compared with each other."""
    updates: int = 2
    """Optimizer steps on what one step sampled, each on its own part of the groups."""
    max_tokens: int = 12
    """Of a completion."""
    learning_rate: float = 5e-4
    lora_rank: int = 16
    largest: int = 9
    """Of the numbers that are added."""
    held_out: int = 12
    """Pairs of numbers that are never trained on, in either order."""
    held_out_completions: int = 1
    """Of each prompt that is held out, at every evaluation."""
    eval_every: int = 4


CPU = Setting()
GPU = Setting(engine='vllm', steps=200, prompts=32, completions=16, largest=99, held_out=128, eval_every=10)


def main() -> None:
    """Run it as the command line says."""
    train(read_recipe('grpo_arithmetic', str(__doc__), {'cpu': CPU, 'gpu': GPU}))


def train(recipe: Recipe[Setting]) -> None:
    """Sample, reward, learn, and again; what came of it is in the curves."""
    setting = recipe.setting
    training, held_out = sums(setting)
    model = build_model(setting, seed=recipe.seed)
    batches = forever(DataLoader(training, batch_size=setting.prompts, shuffle=True, seed=recipe.seed, drop_last=True))
    plotted = ('held_out_reward', 'reward', 'train/approx_kl', 'train/clip_ratio', 'entropy')
    with (
        ExitStack() as stack,
        Curves(recipe.out, title='GRPO: sums in a form', total_steps=setting.steps + 1, plotted=plotted) as curves,
    ):
        sampler = build_sampler(setting, stack)
        manager = CheckpointEngineManager(model=model, sampler=sampler)
        for step in range(setting.steps):
            version = manager.sync_weights(merge_and_sync=False).version
            numbers = evaluate(sampler, held_out, setting) if step % setting.eval_every == 0 else {}
            seed = recipe.seed * 100_000 + step
            groups = draw(sampler, next(batches), setting, seed=seed)
            curves.record(**numbers, **learn(model, groups, setting, version=version))
        manager.sync_weights(merge_and_sync=False)
        curves.record(**evaluate(sampler, held_out, setting))


class TaggedReward(TextReward):
    """1 where a number stands in its tags."""

    def score(self, completion: str) -> float:
        """Return it of one completion."""
        return float(bool(ANSWER.search(completion)))


class SumReward(AnswerReward):
    """1 where the last number in tags is the sum."""

    def score(self, completion: str, ground_truth: int) -> float:
        """Return it of one completion."""
        return float(ANSWER.findall(completion)[-1:] == [str(ground_truth)])


def sums(setting: Setting) -> tuple[Dataset, Dataset]:
    """Return the sums to train on, and those held out; a sum and its mirror are on the same side."""
    numbers = range(1, setting.largest + 1)
    pairs = [(left, right) for left in numbers for right in numbers if left <= right]
    random.Random(SPLIT_SEED).shuffle(pairs)
    held_out, training = pairs[: setting.held_out], pairs[setting.held_out :]
    return Dataset(DatasetMeta(data=rows_of(training))), Dataset(DatasetMeta(data=rows_of(held_out)))


def rows_of(pairs: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """Return a chat for each pair in either order."""
    return [
        {
            'messages': [*EXAMPLE, {'role': 'user', 'content': f'{left} + {right}'}],
            'user_data': [pack_value('ground_truth', left + right)],
        }
        for pair in pairs
        for left, right in sorted({pair, pair[::-1]})
    ]


def build_model(setting: Setting, *, seed: int) -> TransformersModel:
    """Return a trainer with a fresh adapter."""
    model = TransformersModel(setting.model)
    config = LoraConfig(r=setting.lora_rank, lora_alpha=2 * setting.lora_rank, seed=seed)
    model.add_adapter_to_model('default', config)
    model.set_optimizer('AdamW', lr=setting.learning_rate)
    model.set_loss('GRPOLoss', epsilon=0.2)
    model.add_metric('GRPOMetric', epsilon=0.2)
    return model


def build_sampler(setting: Setting, stack: ExitStack) -> Sampler:
    """Return what samples; `stack` closes it."""
    if setting.engine == 'torch':
        return TorchSampler(setting.model)
    arguments = {'max_model_len': 256, 'max_lora_rank': setting.lora_rank, 'max_loras': 2}
    return stack.enter_context(vLLMSampler(setting.model, arguments))


def forever(loader: DataLoader) -> Iterator[list[Any]]:
    """Yield batches, epoch after epoch."""
    while True:
        yield from loader


def draw(sampler: Sampler, prompts: Sequence[Any], setting: Setting, *, seed: int) -> list[SampleResponse]:
    """Return a response for each prompt, each with a group of completions."""
    params = SamplingParams(max_tokens=setting.max_tokens, seed=seed)
    return sampler.sample(prompts, params, num_samples=setting.completions)


def score(features: Sequence[InputFeature]) -> dict[str, list[float]]:
    """Return each completion's rewards by name; `total` is the mean of the others."""
    accuracy, form = SumReward()(features), TaggedReward()(features)
    return {'accuracy': accuracy, 'format': form, 'total': [(a + f) / 2 for a, f in zip(accuracy, form, strict=True)]}


def learn(
    model: TransformersModel, responses: Sequence[SampleResponse], setting: Setting, *, version: int
) -> dict[str, float]:
    """Update the adapter on what was sampled; return the step's numbers."""
    sequences = [sequence for response in responses for sequence in response.sequences]
    features = [sequence.new_input_feature for sequence in sequences]
    rewards = score(features)
    advantages = GRPOAdvantage()(rewards['total'], num_generations=setting.completions).tolist()
    size = len(features) // setting.updates
    for begin in range(0, size * setting.updates, size):
        part = slice(begin, begin + size)
        model.forward_backward(features[part], advantages=advantages[part])
        model.clip_grad_and_step()
    earned = CompletionRewardMetric()
    earned.accumulate(rewards=rewards, completion_lengths=[len(sequence.tokens) for sequence in sequences])
    trained = model.calculate_metric()
    return {
        'reward': sum(rewards['total']) / len(features),
        **earned.calculate(),
        'entropy': -trained['train/mean_old_logp'],
        'staleness': max(staleness_of(sequence, version=version) for sequence in sequences),
        **{name: trained[name] for name in DIAGNOSTICS},
    }


def evaluate(sampler: Sampler, held_out: Dataset, setting: Setting) -> dict[str, float]:
    """Return the mean rewards of answers to the sums held out: drawn as in training, and the likeliest ones."""
    params = SamplingParams(max_tokens=setting.max_tokens)
    # One call each, since prompts of one call share their random numbers.
    drawn = [
        response
        for index, prompt in enumerate(held_out)
        for response in sampler.sample(prompt, replace(params, seed=index), num_samples=setting.held_out_completions)
    ]
    greedy = sampler.sample(list(held_out), replace(params, temperature=0.0))
    rewards, greedy_rewards = score(features_of(drawn)), score(features_of(greedy))
    return {
        'held_out_reward': fmean(rewards['total']),
        'held_out_accuracy': fmean(rewards['accuracy']),
        'held_out_format': fmean(rewards['format']),
        'held_out_greedy_reward': fmean(greedy_rewards['total']),
    }


def features_of(responses: Sequence[SampleResponse]) -> list[InputFeature]:
    """Return all completions, each with its prompt, as features."""
    return [sequence.new_input_feature for response in responses for sequence in response.sequences]


if __name__ == '__main__':
    main()
