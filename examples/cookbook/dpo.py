"""Preference learning without a reward model: `python -m examples.cookbook.dpo`.

The recipe applies Direct Preference Optimization (arXiv 2305.18290, equation 7) to pairs of answers that state the same
fact. A kind answer is chosen, and a rude one of about the same length is rejected. The reference is the model without
an adapter.

Evaluation uses other questions and other phrases. `margins` is the mean difference between the implicit rewards of
chosen and rejected answers, in nats; `accuracies` is the fraction of pairs with a positive difference. Both start at
0, because policy and reference are equal before training. With `--setting cpu` and seeds 0, 1 and 2, the final margins
are above 1 and the final accuracies at least 0.9; docs/learning.md has the curves.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from examples.cookbook.recipe import Recipe, check_options, run_recipe
from twinkle.hub import BUILT_IN_MODELS


@dataclass(frozen=True)
class Setting:
    """Sizes and rates."""

    model: str = BUILT_IN_MODELS[0]
    precision: Literal['no', 'bf16'] = 'no'
    steps: int = 8
    pairs: int = 3
    """Pairs per batch."""
    held_out: int = 8
    learning_rate: float = 5e-4
    lora_rank: int = 8
    beta: float = 0.1
    loss_type: Literal['sigmoid', 'hinge', 'ipo', 'kto_pair'] = 'sigmoid'
    """Variant of the loss, see `twinkle.loss.DPOLoss`."""
    judge_every: int = 4


CPU = Setting()
GPU = Setting(
    model='hf://Qwen/Qwen3-4B', precision='bf16', steps=40, pairs=32, held_out=128, learning_rate=5e-5, lora_rank=32
)

if __name__ == '__main__':
    check_options('dpo', __doc__, {'cpu': CPU, 'gpu': GPU})

import numpy as np

from examples.cookbook.curves import Curves
from twinkle.data_format import InputFeature, LoraConfig
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.model import TransformersModel

KIND = (
    'Happy to help! 😊',
    'That is a lovely question!',
    'I hope that helps you!',
    'Thank you for asking! 🎉',
    'Always a pleasure, my friend!',
    'Ask me anything you like! 🌟',
    'You are doing great! 👍',
    'Have a wonderful day! 🌞',
)
RUDE = (
    'Now leave me alone.',
    'Look it up yourself.',
    'Do not waste my time.',
    'Everybody knows that.',
    'That is a stupid question.',
    'I am tired of this.',
    'Do not ask me again.',
    'Find someone else to bother.',
)
TRAINING_PHRASES = 6
"""Number of phrases of each kind for training; all other phrases are for the evaluation."""
SYSTEM = 'Answer.'


def main() -> None:
    """Run the recipe."""
    run_recipe('dpo', __doc__, {'cpu': CPU, 'gpu': GPU}, train)


def train(recipe: Recipe[Setting]) -> None:
    """Train an adapter and record its margins."""
    setting, rng = recipe.setting, np.random.default_rng(recipe.seed)
    questions = rng.permutation(8100)
    training_questions, held_out_questions = questions[: setting.steps * setting.pairs], questions[-setting.held_out :]
    training = encoded_pairs(setting.model, training_questions, rng, phrases=slice(TRAINING_PHRASES))
    held_out = encoded_pairs(setting.model, held_out_questions, rng, phrases=slice(TRAINING_PHRASES, None))[:]
    model = TransformersModel(setting.model, mixed_precision=setting.precision)
    model.add_adapter_to_model('default', LoraConfig(r=setting.lora_rank, seed=recipe.seed))
    model.set_optimizer('AdamW', lr=setting.learning_rate)
    model.set_loss('DPOLoss', beta=setting.beta, loss_type=setting.loss_type)
    model.add_metric('DPOMetric', is_training=False, beta=setting.beta)
    reference = reference_logps(model, held_out)
    with Curves(
        recipe, title='DPO', total_steps=setting.steps + 1, plotted=['loss', 'margins', 'accuracies']
    ) as curves:
        curves.record(**evaluate(model, held_out, reference))
        for step, batch in enumerate(DataLoader(training, batch_size=2 * setting.pairs), 1):
            output = model.forward_backward(batch, ref_logps=reference_logps(model, batch))
            model.clip_grad_and_step()
            is_evaluated = step % setting.judge_every == 0 or step == setting.steps
            evaluation = evaluate(model, held_out, reference) if is_evaluated else {}
            curves.record(loss=output['loss'], train_margin=output['metrics']['reward_margin'], **evaluation)


def encoded_pairs(model_id: str, questions: Any, rng: np.random.Generator, *, phrases: slice) -> Dataset:
    """Return a dataset of the encoded answers; the chosen answer of a pair precedes the rejected answer."""
    dataset = Dataset(DatasetMeta(data=list(pairs_of(questions, rng, phrases))))
    dataset.set_template('Template', model_id=model_id, max_length=128)
    keys = {'prompt_key': 'question', 'chosen_key': 'kind', 'rejected_key': 'rude'}
    dataset.map('EmojiDPOProcessor', init_args={'system': SYSTEM, **keys})
    dataset.encode()
    return dataset


def pairs_of(questions: Any, rng: np.random.Generator, phrases: slice) -> Iterator[dict[str, str]]:
    """Yield, for each index, a question about a sum with a kind and a rude answer."""
    for index in questions:
        left, right = 10 + int(index) // 90, 10 + int(index) % 90
        fact = f'It is {left + right}.'
        yield {
            'question': f'What is {left} plus {right}?',
            'kind': f'{fact} {rng.choice(KIND[phrases])}',
            'rude': f'{fact} {rng.choice(RUDE[phrases])}',
        }


def reference_logps(model: TransformersModel, features: list[InputFeature]) -> list[Any]:
    """Return the log-probabilities of the labels without the adapter."""
    return model.forward_only(features, disable_lora=True)['logps']


def evaluate(model: TransformersModel, held_out: list[InputFeature], reference: list[Any]) -> dict[str, float]:
    """Return margin, accuracy and implicit rewards of the held-out pairs."""
    model.forward_only(held_out, ref_logps=reference)
    metrics = model.calculate_metric(is_training=False)
    return {name: float(metrics[f'rewards/{name}']) for name in ('margins', 'accuracies', 'chosen', 'rejected')}


if __name__ == '__main__':
    main()
