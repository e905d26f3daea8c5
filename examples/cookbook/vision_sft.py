"""Vision-language fine-tuning: answer questions about pictures.

Each picture shows one coloured shape at a random position on a grey background, and the questions ask for the shape's
colour or size. The recipe draws the pictures itself. It measures the accuracy on held-out questions, and as a baseline
the accuracy on the same questions with an empty picture.

With `--setting cpu`, the model is tiny and has random weights (`examples/cookbook/tiny_vision.py`). In both settings
the vision tower is frozen, so only the text layers learn.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from examples.cookbook.recipe import Recipe, check_options, endless, run_recipe


@dataclass(frozen=True)
class Setting:
    """Sizes and rates."""

    model: str = ''
    """Hub id or folder. Empty: a tiny model with random weights, created in the output folder."""
    precision: Literal['no', 'bf16'] = 'no'
    pictures: int = 240
    """Number of training pictures, with two questions each."""
    held_out: int = 60
    """Number of held-out pictures."""
    side: int = 32
    """Side of a picture in pixels."""
    steps: int = 120
    batch_size: int = 16
    evaluate_every: int = 40
    """Steps between evaluations on the held-out pictures."""
    lora_rank: int = 32
    learning_rate: float = 4e-3


CPU = Setting()
GPU = Setting(
    model='hf://Qwen/Qwen2.5-VL-3B-Instruct',
    precision='bf16',
    pictures=2000,
    held_out=200,
    side=224,
    steps=200,
    evaluate_every=25,
    learning_rate=1e-4,
)

if __name__ == '__main__':
    check_options('vision_sft', __doc__, {'cpu': CPU, 'gpu': GPU})

from PIL import Image, ImageDraw

from examples.cookbook.curves import Curves
from examples.cookbook.tiny_vision import build_tiny_vision_model
from twinkle.checkpoint_engine import CheckpointEngineManager
from twinkle.data_format import LoraConfig, SamplingParams
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.model import TransformersModel
from twinkle.sampler import TorchSampler

COLOURS = {'red': (220, 40, 40), 'green': (40, 180, 60), 'blue': (50, 70, 220), 'yellow': (230, 210, 40)}
SHAPES = ('circle', 'square', 'triangle')
BACKGROUND = (128, 128, 128)
SIZES = {'small': (0.2, 0.28), 'large': (0.55, 0.7)}
"""Smallest and largest size of a shape, as a fraction of the picture's side."""
QUESTIONS = {'colour': '<image>Which colour?', 'size': '<image>How large?'}


@dataclass(frozen=True)
class Picture:
    """A picture with its answers."""

    image: Image.Image
    colour: str
    size: str

    def chats(self, image: Image.Image | None = None) -> list[dict[str, Any]]:
        """Return both questions with their answers, with the picture or with the given image."""
        return [
            {
                'messages': [
                    {'role': 'user', 'content': question},
                    {'role': 'assistant', 'content': getattr(self, about)},
                ],
                'images': [self.image if image is None else image],
            }
            for about, question in QUESTIONS.items()
        ]


def main() -> None:
    """Run the recipe."""
    run_recipe('vision_sft', __doc__, {'cpu': CPU, 'gpu': GPU}, train)


def train(recipe: Recipe[Setting]) -> None:
    """Train, and evaluate on the held-out pictures at intervals."""
    setting, rng = recipe.setting, random.Random(recipe.seed)
    model_id = setting.model or str(build_tiny_vision_model(recipe.out / 'model', seed=recipe.seed))
    pictures = [draw(rng, setting.side) for _ in range(setting.pictures)]
    held_out = [draw(rng, setting.side) for _ in range(setting.held_out)]
    dataset = Dataset(DatasetMeta(data=[chat for picture in pictures for chat in picture.chats()]))
    dataset.set_template('Template', model_id=model_id, max_length=512)
    dataset.encode()
    model = TransformersModel(model_id, mixed_precision=setting.precision)
    model.add_adapter_to_model(
        'default', LoraConfig(r=setting.lora_rank, lora_alpha=setting.lora_rank, seed=recipe.seed)
    )
    model.set_optimizer('AdamW', lr=setting.learning_rate)
    model.set_lr_scheduler('CosineWarmupScheduler', num_warmup_steps=10, num_training_steps=setting.steps + 1)
    sampler = TorchSampler(model_id, model=model.engine.model)
    manager = CheckpointEngineManager(model=model, sampler=sampler)
    batches = endless(DataLoader(dataset, batch_size=setting.batch_size, shuffle=True, seed=recipe.seed))
    plotted = ['loss', 'accuracy', 'blind_accuracy']
    with Curves(recipe, title='vision fine-tuning', total_steps=setting.steps + 1, plotted=plotted) as curves:
        manager.sync_weights(merge_and_sync=False)
        curves.record(**evaluate(sampler, held_out))
        for step in range(1, setting.steps + 1):
            numbers = {'loss': model.forward_backward(next(batches))['loss']}
            model.clip_grad_and_step(1.0)
            if step % setting.evaluate_every == 0 or step == setting.steps:
                manager.sync_weights(merge_and_sync=False)
                numbers |= evaluate(sampler, held_out)
            curves.record(**numbers)


def draw(rng: random.Random, side: int) -> Picture:
    """Draw a random shape at a random position."""
    colour, size, shape = rng.choice(list(COLOURS)), rng.choice(list(SIZES)), rng.choice(SHAPES)
    image = Image.new('RGB', (side, side), BACKGROUND)
    length = round(side * rng.uniform(*SIZES[size]))
    left, top = rng.randint(0, side - length), rng.randint(0, side - length)
    box = (left, top, left + length, top + length)
    pen = ImageDraw.Draw(image)
    if shape == 'circle':
        pen.ellipse(box, fill=COLOURS[colour])
    elif shape == 'square':
        pen.rectangle(box, fill=COLOURS[colour])
    else:
        pen.polygon([(left, top + length), (left + length, top + length), (left, top)], fill=COLOURS[colour])
    return Picture(image, colour, size)


def evaluate(sampler: TorchSampler, held_out: Sequence[Picture]) -> dict[str, float]:
    """Return the accuracies with the pictures and with an empty picture."""
    empty = Image.new('RGB', held_out[0].image.size, BACKGROUND)
    return {
        'accuracy': accuracy(sampler, [chat for picture in held_out for chat in picture.chats()]),
        'blind_accuracy': accuracy(sampler, [chat for picture in held_out for chat in picture.chats(empty)]),
    }


def accuracy(sampler: TorchSampler, chats: Sequence[dict[str, Any]]) -> float:
    """Return the fraction of questions whose greedy answer is correct."""
    questions = [{**chat, 'messages': chat['messages'][:1]} for chat in chats]
    responses = sampler.sample(questions, SamplingParams(max_tokens=8, temperature=0.0))
    answers = [chat['messages'][1]['content'] for chat in chats]
    pairs = zip(responses, answers, strict=True)
    return sum(response.sequences[0].decoded.strip() == answer for response, answer in pairs) / len(answers)


if __name__ == '__main__':
    main()
