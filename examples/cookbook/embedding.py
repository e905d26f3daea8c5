"""Contrastive training of text embeddings: `python -m examples.cookbook.embedding`.

The recipe turns a language model into an embedding model: the hidden state of the last token is the vector of a text.
InfoNCE (arXiv 1807.03748, equation 4) moves the vector of a question closer to the vector of the title with the same
meaning, and away from the other titles of the batch. A question and its title share no noun and no verb ("How do I
repair a car?", "Fixing an automobile."). With `--setting cpu`, training uses no pair twice.

Evaluation uses 32 held-out pairs: `accuracy` is the fraction of questions whose title is the nearest of all 32. With
`--setting cpu` and seeds 0, 1 and 2 it rises from at most 0.40 to at least 0.80; docs/learning.md has the curves.
"""

import itertools
from dataclasses import dataclass
from typing import Any, Literal

from examples.cookbook.recipe import Recipe, check_options, endless, run_recipe
from twinkle.hub import BUILT_IN_MODELS


@dataclass(frozen=True)
class Setting:
    """Sizes and rates."""

    model: str = BUILT_IN_MODELS[0]
    precision: Literal['no', 'bf16'] = 'no'
    steps: int = 10
    pairs: int = 12
    """Pairs per batch. The titles of the other pairs are the negatives of a question."""
    learning_rate: float = 1e-3
    lora_rank: int = 8
    temperature: float = 0.05
    judge_every: int = 5


CPU = Setting()
GPU = Setting(model='hf://Qwen/Qwen3-4B', precision='bf16', steps=40, pairs=32, learning_rate=2e-4, lora_rank=32)

if __name__ == '__main__':
    check_options('embedding', __doc__, {'cpu': CPU, 'gpu': GPU})

import numpy as np

from examples.cookbook.curves import Curves
from twinkle.data_format import InputFeature, LoraConfig
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.model import TransformersModel
from twinkle.preprocessor import Columns, Preprocessor

VERBS = (
    ('repair', 'Fixing'),
    ('purchase', 'Buying'),
    ('wash', 'Cleaning'),
    ('sketch', 'Drawing'),
    ('conceal', 'Hiding'),
    ('construct', 'Building'),
    ('carry', 'Moving'),
    ('photograph', 'Taking a picture of'),
    ('get rid of', 'Throwing away'),
    ('look after', 'Caring for'),
    ('choose', 'Picking'),
    ('wrap', 'Packing'),
)
NOUNS = (
    ('a car', 'an automobile'),
    ('a bicycle', 'a bike'),
    ('a sofa', 'a couch'),
    ('a house', 'a home'),
    ('a gift', 'a present'),
    ('a kitten', 'a small cat'),
    ('a puppy', 'a young dog'),
    ('a cup', 'a mug'),
    ('a jacket', 'a coat'),
    ('a boat', 'a ship'),
    ('a phone', 'a mobile'),
    ('a stone', 'a rock'),
    ('a wood', 'a forest'),
    ('a road', 'a street'),
    ('a shop', 'a store'),
    ('a rug', 'a carpet'),
)
HELD_OUT = 32
"""Number of pairs for the evaluation."""


class PairProcessor(Preprocessor):
    """Splits each pair into two rows, first the anchor and then its positive, in the order that InfoNCE expects."""

    def __call__(self, rows: Columns) -> Columns:
        texts = [text for pair in zip(rows['question'], rows['title'], strict=True) for text in pair]
        return {'messages': [[{'role': 'user', 'content': text}] for text in texts]}


def main() -> None:
    """Run the recipe."""
    run_recipe('embedding', __doc__, {'cpu': CPU, 'gpu': GPU}, train)


def train(recipe: Recipe[Setting]) -> None:
    """Train an adapter and record its retrieval accuracy."""
    setting = recipe.setting
    training, held_out = encoded_pairs(setting.model, seed=recipe.seed)
    loader = DataLoader(training, batch_size=2 * setting.pairs, drop_last=True)
    loader.set_processor(with_labels)
    model = TransformersModel(setting.model, mixed_precision=setting.precision)
    model.add_adapter_to_model('default', LoraConfig(r=setting.lora_rank, seed=recipe.seed))
    model.set_optimizer('AdamW', lr=setting.learning_rate)
    model.set_loss('InfonceLoss', temperature=setting.temperature)
    model.add_metric('EmbeddingMetric')
    plotted = ['loss', 'accuracy', 'pos_sim', 'neg_sim']
    with Curves(recipe, title='InfoNCE', total_steps=setting.steps + 1, plotted=plotted) as curves:
        curves.record(**evaluate(model, held_out))
        for step, batch in enumerate(itertools.islice(endless(loader), setting.steps), 1):
            output = model.forward_backward(batch, task='embedding')
            model.clip_grad_and_step()
            is_evaluated = step % setting.judge_every == 0 or step == setting.steps
            evaluation = evaluate(model, held_out) if is_evaluated else {}
            metrics = model.calculate_metric()
            curves.record(loss=output['loss'], pos_sim=metrics['pos_sim'], neg_sim=metrics['neg_sim'], **evaluation)


def encoded_pairs(model_id: str, *, seed: int) -> tuple[Dataset, list[InputFeature]]:
    """Return the training pairs, and the held-out pairs as one batch."""
    pairs = [
        {'question': f'How do I {verb} {noun}?', 'title': f'{verb_synonym} {noun_synonym}.'}
        for verb, verb_synonym in VERBS
        for noun, noun_synonym in NOUNS
    ]
    order = np.random.default_rng(seed).permutation(len(pairs))
    datasets: list[Dataset] = []
    for indices in (order[HELD_OUT:], order[:HELD_OUT]):
        dataset = Dataset(DatasetMeta(data=[pairs[index] for index in indices]))
        dataset.set_template('Template', model_id=model_id, use_chat_template=False, max_length=64)
        dataset.map(PairProcessor())
        dataset.encode(add_generation_prompt=True)
        datasets.append(dataset)
    return datasets[0], with_labels(datasets[1][:])


def with_labels(rows: list[Any]) -> list[InputFeature]:
    """Return the texts with one label each, as the loss expects: 1 for an anchor, 0 for its positive."""
    return [{'input_ids': row['input_ids'], 'labels': [1 - index % 2]} for index, row in enumerate(rows)]


def evaluate(model: TransformersModel, held_out: list[InputFeature]) -> dict[str, float]:
    """Return the retrieval accuracy and the similarity margin of the held-out pairs."""
    metrics = model.forward_only(held_out, task='embedding')['metrics']
    return {'accuracy': metrics['accuracy'], 'margin': metrics['positive_similarity'] - metrics['negative_similarity']}


if __name__ == '__main__':
    main()
