"""Four tenants use one base model at the same time. The results of each tenant are bitwise equal to a solo run.

Tenant A teaches the model its name (SFT, LoRA rank 8). B continues pre-training on plain text (rank 32). C trains with
GRPO to write letters, and samples from every version. D only computes log-probabilities. Each tenant has its own key,
client and thread; the services compute their batches in shared passes.

The recipe runs all four tenants at the same time, and then each tenant alone. Losses, log-probabilities, samples and
the digests of the final weights must be bitwise equal. With vLLM, C can differ, because rounding in a sample depends on
the other requests in a step of the engine. `--solo B` runs tenant B alone. The recipe connects to running services
(TWINKLE_SERVER_URL or `twinkle up --engine torch`), or starts them for the run.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from examples.cookbook.recipe import Recipe, check_options, run_recipe
from twinkle_client.stack import DEFAULT_MODEL


@dataclass(frozen=True)
class Setting:
    """Sizes and rates of all tenants."""

    model: str = DEFAULT_MODEL
    solo: Literal['A', 'B', 'C', 'D', 'none'] = 'none'
    """Tenant to run alone. 'none': all at the same time, then each alone."""
    steps: int = 4
    batch_size: int = 4
    sequence_tokens: int = 128
    generations: int = 4
    max_tokens: int = 12
    learning_rate: float = 2e-3


CPU = Setting()
GPU = Setting(steps=40, batch_size=16, sequence_tokens=1024, generations=8, max_tokens=64, learning_rate=5e-4)

if __name__ == '__main__':
    check_options('four_tenants', __doc__, {'cpu': CPU, 'gpu': GPU})

import numpy as np

from examples.cookbook import pretraining
from examples.cookbook.serving import connected
from examples.cookbook.tenants import Log, Tenant, run_tenants
from twinkle.advantage import GRPOAdvantage
from twinkle.data_format import LoraConfig, SamplingParams
from twinkle.reward import TextReward
from twinkle_client import TwinkleClient
from twinkle_client.checkpoint_engine import CheckpointEngineManager
from twinkle_client.dataloader import DataLoader
from twinkle_client.dataset import Dataset
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.sampler import Sampler

PROMPTS = ('Tell me a story.', 'Say something.', 'What is your name?', 'Describe the sea.')


def fine_tune(recipe: Recipe[Setting], client: TwinkleClient, log: Log) -> None:
    """Run tenant A: supervised fine-tuning on data that the data service prepares."""
    setting = recipe.setting
    dataset = Dataset('examples/data/self_cognition.jsonl', client=client)
    dataset.set_template('Template', model_id=setting.model, max_length=256)
    dataset.map('SelfCognitionProcessor', init_args={'model_name': 'Twinkle', 'model_author': 'the Twinkle team'})
    dataset.encode()
    loader = DataLoader(dataset, batch_size=setting.batch_size, shuffle=True, seed=recipe.seed, epochs=0)
    batches = [batch for _, batch in zip(range(setting.steps), loader, strict=False)]
    model = adapter(recipe, client, log, lora_rank=8)
    learn(model, batches, log)
    log.weights(client, model)


def pretrain(recipe: Recipe[Setting], client: TwinkleClient, log: Log) -> None:
    """Run tenant B: continued pre-training on text that the client packs."""
    setting = recipe.setting
    packs = packed_text(setting)
    model = adapter(recipe, client, log, lora_rank=32)
    learn(model, [[packs[step % len(packs)], packs[(step + 1) % len(packs)]] for step in range(setting.steps)], log)
    log.weights(client, model)


def reinforce(recipe: Recipe[Setting], client: TwinkleClient, log: Log) -> None:
    """Run tenant C: GRPO, in which each step samples with the newest weights and a different seed."""
    setting = recipe.setting
    model, sampler = adapter(recipe, client, log, lora_rank=8), Sampler(setting.model, client=client)
    model.set_loss('GRPOLoss', epsilon=0.2)
    manager = CheckpointEngineManager(model=model, sampler=sampler)
    chats = [{'messages': [{'role': 'user', 'content': prompt}]} for prompt in PROMPTS]
    log.start.wait()
    for step in range(setting.steps):
        version = manager.sync_weights(merge_and_sync=False).version
        params = SamplingParams(max_tokens=setting.max_tokens, logprobs=1, seed=1000 * recipe.seed + step)
        sequences = sampler.sample(chats, params, num_samples=setting.generations).sequences
        assert {span.version for sequence in sequences for span in sequence.version_spans} == {version}
        features = [sequence.new_input_feature for sequence in sequences]
        rewards = LetterReward()(features)
        advantages = GRPOAdvantage()(rewards, num_generations=setting.generations).tolist()
        facts = {'rewards': rewards, 'advantages': advantages, 'groups': setting.generations}
        log.tracker.log_rollouts(sequences, step=step, **facts)
        output = model.forward_backward(features, advantages=advantages)
        model.clip_grad_and_step()
        sampled = [feature[name] for feature in features for name in ('input_ids', 'old_logps')]
        log.step(output, *sampled, reward=float(np.mean(rewards)))
    log.weights(client, model)


def score(recipe: Recipe[Setting], client: TwinkleClient, log: Log) -> None:
    """Run tenant D: log-probabilities of texts under the base model, from the model service and the sampler."""
    setting = recipe.setting
    packs = packed_text(setting)
    model, sampler = adapter(recipe, client, log, lora_rank=8), Sampler(setting.model, client=client)
    log.start.wait()
    for step in range(setting.steps):
        feature = packs[-1 - step % len(packs)]
        output = model.forward_only([feature], disable_lora=True)
        (logps,) = sampler.compute_logprobs([feature['input_ids'][: setting.max_tokens]])
        log.step(output, logps[1:], mean_logprob=-output['loss'])
    log.remove(model)


def learn(model: MultiLoraTransformersModel, batches: list[Any], log: Log) -> None:
    """Submit a step for each batch without waiting for the previous step, and log the results."""
    log.start.wait()
    with model.pipeline():
        outputs = [(model.forward_backward.submit(batch), model.clip_grad_and_step.submit()) for batch in batches]
        for forward, _ in outputs:
            log.step(forward.result(), loss=forward.result()['loss'])


class LetterReward(TextReward):
    """The fraction of letters in a completion, which even a model with random weights can learn to increase."""

    def score(self, completion: str) -> float:
        return sum(character.isalpha() for character in completion) / max(len(completion), 1)


def adapter(recipe: Recipe[Setting], client: TwinkleClient, log: Log, *, lora_rank: int) -> MultiLoraTransformersModel:
    """Return a model handle with a new adapter, whose initial weights depend only on the seed and the rank."""
    model = MultiLoraTransformersModel(recipe.setting.model, client=client)
    model.add_adapter_to_model('default', LoraConfig(r=lora_rank, lora_alpha=2 * lora_rank, seed=recipe.seed))
    model.set_optimizer('AdamW', lr=recipe.setting.learning_rate)
    log.track(model)
    return model


def packed_text(setting: Setting) -> list[dict[str, Any]]:
    """Return the paragraphs of the documentation as packs of tokens."""
    texts = pretraining.paragraphs(Path('docs'))
    return list(pretraining.packed(texts, model_id=setting.model, pack_tokens=setting.sequence_tokens))


def main() -> None:
    """Run the recipe."""
    run_recipe('four_tenants', __doc__, {'cpu': CPU, 'gpu': GPU}, compare)


def compare(recipe: Recipe[Setting]) -> None:
    """Run the tenants together and alone, compare the results bitwise, and print the outcome."""
    tenants = [
        Tenant('A', partial(fine_tune, recipe), plotted='loss'),
        Tenant('B', partial(pretrain, recipe), plotted='loss'),
        Tenant('C', partial(reinforce, recipe), plotted='reward'),
        Tenant('D', partial(score, recipe), plotted='mean_logprob'),
    ]
    solo, together, alone = recipe.setting.solo, dict[str, Log](), dict[str, Log]()
    with connected(recipe.setting.model) as admin:
        run = partial(run_tenants, admin, steps=recipe.setting.steps)
        if solo == 'none':
            together = run(tenants, recipe=replace(recipe, out=recipe.out / 'together'), title='together')
        for tenant in [tenant for tenant in tenants if solo in {'none', tenant.name}]:
            own = replace(recipe, out=recipe.out / f'{tenant.name}_alone')
            alone |= run([tenant], recipe=own, title=f'{tenant.name} alone')
    is_equal = {name: log.digests == alone[name].digests for name, log in together.items()}
    for name, equal in is_equal.items():
        shared = max(together[name].pass_adapter_counts)
        print(f'{name}: {"bitwise equal" if equal else "DIFFERENT"}, up to {shared} adapters in a pass')
    if not all(is_equal.values()):
        raise SystemExit(1)


if __name__ == '__main__':
    main()
