"""Reinforcement learning without services: `python -m examples.grpo_in_process --model <hub id or folder>`.

With `--workers N`, the same loop trains in N worker processes on Ray and samples in N others.

Each step of the loop samples completions, computes their rewards, trains with the GRPO loss, and copies the weights
to the sampler. The program uses only the component library and no service. After every sync the sampler has exactly
the trained weights, so the probability ratio of the two policies is 1 on the samples, up to rounding. The reward is the
fraction of letters, which even a model with random weights can learn to increase.
"""

import argparse
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

import twinkle
from twinkle.advantage import GRPOAdvantage
from twinkle.checkpoint_engine import CheckpointEngineManager
from twinkle.data_format import LoraConfig, SamplingParams
from twinkle.hub import BUILT_IN_MODELS
from twinkle.infra import DeviceGroup
from twinkle.model import TransformersModel
from twinkle.reward import TextReward
from twinkle.sampler import Sampler, TorchSampler, vLLMSampler

PROMPTS = ('Tell me a story.', 'Say something.', 'What is your name?', 'Describe the sea.')
GENERATIONS = 4
"""Completions per prompt, which form a GRPO group."""
LORA_RANK = 8


@dataclass(frozen=True)
class Step:
    """Measurements of one step of the loop."""

    version: int
    """Version of the weights that generated the samples."""
    mean_reward: float
    ratio: float
    """Mean ratio of the trained model's probability of a sampled token to the sampler's; 1 means on policy."""
    largest_difference: float
    """Largest absolute difference in nats between a token's log-probabilities in the trained model and the sampler."""


class LetterReward(TextReward):
    """The fraction of letters in a completion."""

    def score(self, completion: str) -> float:
        return sum(character.isalpha() for character in completion) / max(len(completion), 1)


def main() -> None:
    """Run the loop and print a line for each step."""
    parser = argparse.ArgumentParser(prog='python -m examples.grpo_in_process', description=__doc__)
    parser.add_argument('--model', default=BUILT_IN_MODELS[0], help='hub id or folder')
    parser.add_argument('--steps', type=int, default=10)
    parser.add_argument('--learning-rate', type=float, default=1e-3)
    parser.add_argument('--engine', choices=['torch', 'vllm'], default='torch', help='engine of the sampler')
    parser.add_argument('--workers', type=int, default=0, help='number of trainers and of samplers on Ray; 0: none')
    options = parser.parse_args()
    trainers, samplers = {}, {}
    if options.workers:
        twinkle.initialize(
            mode='ray', groups=[DeviceGroup('model', options.workers), DeviceGroup('sampler', options.workers)]
        )
        trainers, samplers = {'remote_group': 'model'}, {'remote_group': 'sampler'}
    with ExitStack() as stack:
        if options.engine == 'torch':
            sampler: Sampler = TorchSampler(options.model, **samplers)
        else:
            arguments = {'max_model_len': 256, 'max_lora_rank': LORA_RANK, 'max_loras': 2}
            sampler = stack.enter_context(vLLMSampler(options.model, arguments, **samplers))
        model = TransformersModel(options.model, **trainers)
        steps = train(model, sampler, steps=options.steps, learning_rate=options.learning_rate)
        for number, step in enumerate(steps):
            print(
                f'step {number:3} version {step.version:3}  reward {step.mean_reward:.3f}  '
                f'ratio {step.ratio:.6f}  largest difference {step.largest_difference:.2e}',
                flush=True,
            )


def train(
    model: TransformersModel, sampler: Sampler, *, steps: int, learning_rate: float, max_tokens: int = 16
) -> Iterator[Step]:
    """Train an adapter on its own samples, and yield the measurements of each step; `sampler` runs the same model."""
    model.add_adapter_to_model('default', LoraConfig(r=LORA_RANK, lora_alpha=2 * LORA_RANK, seed=1))
    model.set_optimizer('AdamW', lr=learning_rate)
    model.set_loss('GRPOLoss', epsilon=0.2)
    manager = CheckpointEngineManager(model=model, sampler=sampler)
    reward_fn, advantage_fn = LetterReward(), GRPOAdvantage()
    chats = [{'messages': [{'role': 'user', 'content': prompt}]} for prompt in PROMPTS]
    for number in range(steps):
        synced = manager.sync_weights(merge_and_sync=False)
        sampler.reset_prefix_cache()
        params = SamplingParams(max_tokens=max_tokens, logprobs=1, seed=number)
        responses = sampler.sample(chats, params, num_samples=GENERATIONS)
        groups = [response.sequences for response in responses]
        features = [sequence.new_input_feature for group in groups for sequence in group]
        rewards = reward_fn(features)
        advantages = advantage_fn(rewards, num_generations=GENERATIONS, scale='group').tolist()
        output = model.forward_backward(features, advantages=advantages)
        model.clip_grad_and_step()
        yield _measure(synced.version, float(np.mean(rewards)), features, output)


def _measure(version: int, mean_reward: float, features: list[Any], output: Any) -> Step:
    """Compare the trained model's log-probabilities of the sampled tokens with the sampler's."""
    differences: list[float] = []
    for feature, logps in zip(features, output['logps'], strict=True):
        is_sampled = np.asarray(feature['labels']) != -100
        difference = np.asarray(logps)[is_sampled] - np.asarray(feature['old_logps'])[is_sampled]
        differences += difference.tolist()
    return Step(
        version=version,
        mean_reward=mean_reward,
        ratio=float(np.exp(differences).mean()),
        largest_difference=float(np.abs(differences).max()),
    )


if __name__ == '__main__':
    main()
