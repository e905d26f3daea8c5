"""Asynchronous reinforcement learning: sampling of the next batch overlaps with training on the current one.

One thread samples with a separate copy of the weights while the main thread trains; the sampler loads the newest
adapter between two batches. A batch is therefore up to `max_staleness` steps old when it is used. The version of the
weights that generated a token is stored with the token. A group with a sample that is more than `max_staleness` steps
old is dropped, and the loss corrects for the difference between the policies (truncated importance sampling).
`--max-staleness 0` runs the same loop without overlap.

The model is rewarded for capital letters. Curves: `reward`; `staleness`, in steps; `sampler_ratio`, the mean ratio of
the trained model's probability of a token to the sampler's, which is 1 for equal weights.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from examples.cookbook.recipe import Recipe, check_options, run_recipe
from twinkle.hub import BUILT_IN_MODELS


@dataclass(frozen=True)
class Setting:
    """Sizes and rates."""

    model: str
    precision: Literal['no', 'bf16']
    steps: int
    prompts: int
    """Prompts per step."""
    samples: int
    """Completions per prompt, which form a GRPO group."""
    max_tokens: int
    lora_rank: int
    learning_rate: float
    max_staleness: int = field(metadata={'minimum': 0})
    """Maximum number of steps between sampling and training of a batch."""


CPU = Setting(
    model=BUILT_IN_MODELS[0], precision='no', steps=20, prompts=2, samples=8, max_tokens=12, lora_rank=8,
    learning_rate=1e-3, max_staleness=1,
)  # fmt: skip
GPU = Setting(
    model='hf://Qwen/Qwen3-4B', precision='bf16', steps=100, prompts=10, samples=16, max_tokens=64, lora_rank=16,
    learning_rate=1e-5, max_staleness=1,
)  # fmt: skip

if __name__ == '__main__':
    check_options('async_rl', __doc__, {'cpu': CPU, 'gpu': GPU})

import numpy as np

from examples.cookbook.curves import Curves
from examples.cookbook.shouting import TOPICS, ShoutReward, chats_about
from twinkle.advantage import GRPOAdvantage
from twinkle.checkpoint_engine import CheckpointEngineManager
from twinkle.data_format import LoraConfig, SampledSequence, SamplingParams
from twinkle.model import TransformersModel
from twinkle.rollout import AsyncPipeline, as_sampler_logps, drop_stale
from twinkle.sampler import TorchSampler


class Loop:
    """A model in training, and a sampler that can run in parallel."""

    def __init__(self, setting: Setting, *, seed: int) -> None:
        self.setting, self.seed = setting, seed
        self.model = TransformersModel(setting.model, mixed_precision=setting.precision)
        config = LoraConfig(r=setting.lora_rank, lora_alpha=2 * setting.lora_rank, seed=seed)
        self.model.add_adapter_to_model('default', config)
        self.model.set_optimizer('AdamW', lr=setting.learning_rate, weight_decay=0.0)
        self.model.set_loss('GRPOLoss', correction='truncated', correction_high=2.0)
        dtype = 'bfloat16' if setting.precision == 'bf16' else 'float32'
        engine = {'device': str(self.model.engine.model.device), 'dtype': dtype}
        self.sampler = TorchSampler(setting.model, engine)
        self.manager = CheckpointEngineManager(model=self.model, sampler=self.sampler)
        self.newest = 0
        """Version of the weights that were loaded into the sampler last."""

    def prompts(self) -> Iterator[list[dict[str, Any]]]:
        """Yield the chats of each step."""
        rng = np.random.default_rng(self.seed)
        for _ in range(self.setting.steps):
            yield chats_about(rng.choice(TOPICS, self.setting.prompts, replace=False))

    def sample(self, index: int, chats: list[dict[str, Any]]) -> list[SampledSequence]:
        """Return all completions of a step; runs in the pipeline's thread."""
        params = SamplingParams(max_tokens=self.setting.max_tokens, seed=self.seed * self.setting.steps + index)
        responses = self.sampler.sample(chats, params, num_samples=self.setting.samples)
        return [sequence for response in responses for sequence in response.sequences]

    def sync(self) -> None:
        """Load the trained weights into the sampler."""
        self.newest = self.manager.sync_weights(merge_and_sync=False).version

    def learn(self, samples: list[SampledSequence], curves: Curves) -> dict[str, float]:
        """Run one step on the samples that are recent enough, and log them."""
        group = self.setting.samples
        fresh = drop_stale(samples, version=self.newest, max_staleness=self.setting.max_staleness, group_size=group)
        features = [as_sampler_logps(sample.new_input_feature or {}) for sample in fresh.samples]
        rewards = ShoutReward()(features)
        advantages = GRPOAdvantage()(rewards, num_generations=group).tolist()
        curves.log_rollouts(fresh.samples, rewards=rewards, advantages=advantages, groups=group)
        metrics = self.model.forward_backward(features, advantages=advantages)['metrics']
        self.model.clip_grad_and_step()
        numbers = fresh.numbers()
        return {
            'reward': float(np.mean(rewards)),
            'staleness': numbers['staleness/max'],
            'dropped': numbers['staleness/dropped'],
            'sampler_ratio': metrics['sampler_ratio'],
            'corrected_fraction': metrics['corrected_fraction'],
        }


def main() -> None:
    """Run the recipe."""
    run_recipe('async_rl', __doc__, {'cpu': CPU, 'gpu': GPU}, train)


def train(recipe: Recipe[Setting]) -> None:
    """Train, record every step, and print the total time."""
    setting = recipe.setting
    loop = Loop(setting, seed=recipe.seed)
    title = f'asynchronous RL, seed {recipe.seed}, staleness up to {setting.max_staleness}'
    plotted = ('reward', 'staleness', 'sampler_ratio')
    pipeline = AsyncPipeline(loop.sample, loop.prompts(), sync=loop.sync, max_staleness=setting.max_staleness)
    begin = time.monotonic()
    with Curves(recipe, title=title, total_steps=setting.steps, plotted=plotted) as curves, pipeline as batches:
        for batch in batches:
            curves.record(**loop.learn(batch.samples, curves))
    print(f'{setting.steps} steps in {time.monotonic() - begin:.1f} s')


if __name__ == '__main__':
    main()
