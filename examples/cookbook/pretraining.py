"""Continued pre-training on plain text.

The text is this project's documentation, one example per paragraph; every eighth paragraph is held out. Examples are
packed, so that no pass computes padding; paragraphs of a pack do not attend to each other. The recipe trains an adapter
of rank 32 and measures the held-out perplexity, which is exp of the mean negative log-probability of a token.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from examples.cookbook.recipe import Recipe, check_options, endless, run_recipe
from twinkle.hub import BUILT_IN_MODELS


@dataclass(frozen=True)
class Setting:
    """Sizes and rates."""

    model: str = BUILT_IN_MODELS[0]
    precision: Literal['no', 'bf16'] = 'no'
    """'bf16' loads the base model in bfloat16."""
    text: str = 'docs'
    """Folder of Markdown or plain text files."""
    steps: int = 24
    batch_size: int = 2
    """Packs per step."""
    pack_tokens: int = 256
    held_out_packs: int = 6
    evaluate_every: int = 6
    """Steps between evaluations on the held-out text."""
    lora_rank: int = 32
    learning_rate: float = 1e-3


CPU = Setting()
GPU = Setting(
    model='hf://Qwen/Qwen3-4B-Base',
    precision='bf16',
    steps=300,
    batch_size=8,
    pack_tokens=2048,
    held_out_packs=16,
    evaluate_every=20,
    learning_rate=2e-4,
)

if __name__ == '__main__':
    check_options('pretraining', __doc__, {'cpu': CPU, 'gpu': GPU})

import numpy as np

from examples.cookbook.curves import Curves
from twinkle.data_format import LoraConfig
from twinkle.dataloader import DataLoader
from twinkle.dataset import DatasetMeta, PackingDataset
from twinkle.model import TransformersModel

HELD_OUT = 8
"""Interval of the held-out paragraphs: every eighth paragraph."""


def main() -> None:
    """Run the recipe."""
    run_recipe('pretraining', __doc__, {'cpu': CPU, 'gpu': GPU}, train)


def train(recipe: Recipe[Setting]) -> None:
    """Train, and evaluate on the held-out text at intervals."""
    setting = recipe.setting
    texts = paragraphs(Path(setting.text))
    format_ = {'model_id': setting.model, 'pack_tokens': setting.pack_tokens}
    packs = packed([text for number, text in enumerate(texts) if number % HELD_OUT], **format_)
    held_out = packed(texts[::HELD_OUT], **format_)[: setting.held_out_packs]
    model = TransformersModel(setting.model, mixed_precision=setting.precision)
    model.add_adapter_to_model(
        'default', LoraConfig(r=setting.lora_rank, lora_alpha=setting.lora_rank, seed=recipe.seed)
    )
    model.set_optimizer('AdamW', lr=setting.learning_rate)
    model.set_lr_scheduler('CosineWarmupScheduler', num_warmup_steps=2, num_training_steps=setting.steps + 1)
    batches = endless(DataLoader(packs, batch_size=setting.batch_size, shuffle=True, seed=recipe.seed))
    plotted = ['loss', 'held_out_perplexity']
    with Curves(recipe, title='pre-training', total_steps=setting.steps + 1, plotted=plotted) as curves:
        curves.record(held_out_perplexity=perplexity(model, held_out))
        for step in range(1, setting.steps + 1):
            output = model.forward_backward(next(batches))
            model.clip_grad_and_step(1.0)
            numbers = {'loss': output['loss']}
            if step % setting.evaluate_every == 0 or step == setting.steps:
                numbers['held_out_perplexity'] = perplexity(model, held_out)
            curves.record(**numbers)


def paragraphs(folder: Path, *, shortest: int = 80) -> list[str]:
    """Return the paragraphs of a folder's files that begin with a letter and have at least `shortest` characters."""
    files = sorted(path for path in folder.rglob('*') if path.suffix in {'.md', '.txt'})
    blocks = [block.strip() for path in files for block in path.read_text(encoding='utf-8').split('\n\n')]
    return [' '.join(block.split()) for block in blocks if len(block) >= shortest and block[0].isalpha()]


def packed(texts: list[str], *, model_id: str, pack_tokens: int) -> PackingDataset:
    """Return packed texts. With `use_chat_template=False`, an assistant's message is plain text with labels."""
    rows = [{'messages': [{'role': 'assistant', 'content': text}]} for text in texts]
    dataset = PackingDataset(DatasetMeta(data=rows))
    dataset.set_template(
        'Template',
        model_id=model_id,
        max_length=pack_tokens,
        truncation_strategy='split',
        use_chat_template=False,
    )
    dataset.encode()
    dataset.pack_dataset()
    return dataset


def perplexity(model: TransformersModel, packs: list) -> float:
    """Return exp of the mean negative log-probability of a label."""
    output = model.forward_only(packs)
    return math.exp(-sum(float(np.sum(logps)) for logps in output['logps']) / output['num_tokens'])


if __name__ == '__main__':
    main()
