"""PPO with a critic: a model learns to write in capital letters, and a critic learns to predict its returns.

Policy, critic and reference share one base model: the policy and the critic are LoRA adapters, the critic has a value
head, and the reference is the base model. The sampler shares the base model. Each step samples completions and scores
their fraction of capital letters. The score is the reward of the last token, and a penalty for the divergence from the
reference is subtracted from the reward of every token. GAE computes the advantages from the critic's values, and both
adapters are trained in minibatches.

Curves: `heldout_return` is the mean score of held-out prompts, sampled with a fixed seed; `explained_variance` is the
fraction of the returns' variance that the critic predicts in a new batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
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
    """Completions per prompt."""
    max_tokens: int
    lora_rank: int
    policy_lr: float
    critic_lr: float
    kl_coef: float
    """Penalty for the divergence from the reference, in reward per nat."""
    epochs: int
    """Epochs over each batch."""
    minibatch: int
    """Completions per update."""


CPU = Setting(
    model=BUILT_IN_MODELS[0], precision='no', steps=20, prompts=2, samples=8, max_tokens=12, lora_rank=8,
    policy_lr=1e-3, critic_lr=1e-3, kl_coef=0.01, epochs=1, minibatch=8,
)  # fmt: skip
GPU = Setting(
    model='hf://Qwen/Qwen3-4B', precision='bf16', steps=100, prompts=10, samples=16, max_tokens=64, lora_rank=16,
    policy_lr=1e-5, critic_lr=5e-5, kl_coef=0.01, epochs=2, minibatch=40,
)  # fmt: skip

if __name__ == '__main__':
    check_options('ppo', __doc__, {'cpu': CPU, 'gpu': GPU})

import numpy as np

from examples.cookbook.curves import Curves
from examples.cookbook.shouting import HELD_OUT_TOPICS, TOPICS, ShoutReward, chats_about
from twinkle.advantage import GAEAdvantage
from twinkle.checkpoint_engine import CheckpointEngineManager
from twinkle.data_format import LoraConfig, SamplingParams
from twinkle.model import MultiLoraTransformersModel
from twinkle.sampler import Sampler, TorchSampler

HELD_OUT_SEED = 10_000
PLOTTED = ('heldout_return', 'return', 'kl', 'value_error', 'explained_variance')


@dataclass(frozen=True)
class Experience:
    """Sampled completions and their training targets: one row per completion, one number per sampled token."""

    features: list[Any]
    scores: list[float]
    values: list[Any]
    """Values predicted by the critic before training on the batch."""
    rewards_to_go: list[Any]
    """Rewards summed from each token to the end."""
    advantages: list[Any]
    returns: list[Any]
    kl: float
    """Mean divergence between policy and reference per token, in nats."""

    @property
    def numbers(self) -> dict[str, float]:
        """Numbers for the curves."""
        values, rewards_to_go = np.concatenate(self.values), np.concatenate(self.rewards_to_go)
        errors = rewards_to_go - values
        return {
            'return': float(np.mean(self.scores)),
            'kl': self.kl,
            'value_error': float(np.square(errors).mean()),
            'explained_variance': 1.0 - float(errors.var() / max(rewards_to_go.var(), 1e-12)),
        }


def main() -> None:
    """Run the recipe."""
    run_recipe('ppo', __doc__, {'cpu': CPU, 'gpu': GPU}, train)


def train(recipe: Recipe[Setting]) -> None:
    """Train policy and critic, and record the curves."""
    setting = recipe.setting
    model = policy_and_critic(setting, seed=recipe.seed)
    sampler = TorchSampler(setting.model, model=model.engine.model)
    manager = CheckpointEngineManager(model=model, sampler=sampler)
    rng = np.random.default_rng(recipe.seed)
    title = f'PPO with a critic, seed {recipe.seed}'
    with Curves(recipe, title=title, total_steps=setting.steps, plotted=PLOTTED) as curves:
        for step in range(setting.steps):
            manager.sync_weights(merge_and_sync=False, adapter_name='policy')
            held_out = sample(sampler, HELD_OUT_TOPICS, setting, seed=HELD_OUT_SEED)
            topics = rng.choice(TOPICS, setting.prompts, replace=False)
            features = sample(sampler, topics, setting, seed=recipe.seed * setting.steps + step)
            batch = evaluate(model, features, kl_coef=setting.kl_coef)
            update(model, batch, setting, rng)
            curves.log_rollouts(features, rewards=batch.scores, advantages=batch.advantages, groups=setting.samples)
            curves.record(heldout_return=np.mean(ShoutReward()(held_out)), **batch.numbers)


def policy_and_critic(setting: Setting, *, seed: int) -> MultiLoraTransformersModel:
    """Return a model with both adapters; setting the critic's loss creates its value head."""
    model = MultiLoraTransformersModel(setting.model, mixed_precision=setting.precision, max_loras=2)
    for name, rate in (('policy', setting.policy_lr), ('critic', setting.critic_lr)):
        config = LoraConfig(r=setting.lora_rank, lora_alpha=2 * setting.lora_rank, seed=seed)
        model.add_adapter_to_model(name, config)
        model.set_optimizer('AdamW', lr=rate, weight_decay=0.0, adapter_name=name)
    model.set_loss('PPOLoss', epsilon=0.2, adapter_name='policy')
    model.set_loss('PPOValueLoss', epsilon=0.2, adapter_name='critic')
    return model


def sample(sampler: Sampler, topics: Sequence[str], setting: Setting, *, seed: int) -> list[Any]:
    """Return completions as training features, with the log-probabilities of the sampled tokens."""
    params = SamplingParams(max_tokens=setting.max_tokens, seed=seed)
    responses = sampler.sample(chats_about(topics), params, num_samples=setting.samples)
    return [sequence.new_input_feature for response in responses for sequence in response.sequences]


def evaluate(model: MultiLoraTransformersModel, features: list[Any], *, kl_coef: float) -> Experience:
    """Score completions; return them with the critic's values, the advantages and the returns of their tokens."""
    scores = ShoutReward()(features)
    masks = [np.asarray(feature['labels']) != -100 for feature in features]
    reference = model.forward_only(features, adapter_name='policy', disable_lora=True)['logps']
    predicted = model.forward_only(features, adapter_name='critic')['values']
    old_logps = [np.asarray(feature['old_logps'])[mask] for feature, mask in zip(features, masks, strict=True)]
    ref_logps = [row[mask] for row, mask in zip(reference, masks, strict=True)]
    values = [row[: len(mask)][mask] for row, mask in zip(predicted, masks, strict=True)]
    gae = GAEAdvantage(gamma=1.0, gae_lambda=0.95)
    rewards = gae.build_token_rewards(
        scores, [len(row) for row in values], old_logps=old_logps, ref_logps=ref_logps, kl_coef=kl_coef
    )
    advantages, returns = gae(rewards, values)
    rewards_to_go = [np.cumsum(row[::-1])[::-1] for row in rewards]
    kl = float((np.concatenate(old_logps) - np.concatenate(ref_logps)).mean())
    return Experience(features, scores, values, rewards_to_go, advantages, returns, kl)


def update(model: MultiLoraTransformersModel, batch: Experience, setting: Setting, rng: np.random.Generator) -> None:
    """Train both adapters on all minibatches, in a different order in each epoch."""
    for _ in range(setting.epochs):
        order = rng.permutation(len(batch.features))
        for begin in range(0, len(order), setting.minibatch):
            chosen = order[begin : begin + setting.minibatch]
            features = [batch.features[index] for index in chosen]
            model.forward_backward(
                features, adapter_name='policy', advantages=[batch.advantages[index] for index in chosen]
            )
            model.forward_backward(
                features,
                adapter_name='critic',
                returns=[batch.returns[index] for index in chosen],
                old_values=[batch.values[index] for index in chosen],
            )
            model.clip_grad_and_step(adapter_name='policy')
            model.clip_grad_and_step(adapter_name='critic')


if __name__ == '__main__':
    main()
