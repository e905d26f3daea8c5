"""Supervised fine-tuning: teach a chat model its name, in process or with the services.

The data are questions about the model's identity, in examples/data/self_cognition.jsonl. The recipe measures the
fraction of answers with the name before and after the training, on other questions.

`--where services` runs the same loop on running services (TWINKLE_SERVER_URL or `twinkle up`), or starts services.
`teach` is the same in both cases: `in_process` and `services` create its components from different packages. On the
same device with the same data type, both give bitwise equal losses.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from examples.cookbook.recipe import Recipe, check_options, run_recipe
from twinkle.hub import BUILT_IN_MODELS


@dataclass(frozen=True)
class Setting:
    """Sizes and rates."""

    model: str = BUILT_IN_MODELS[0]
    precision: Literal['no', 'bf16'] = 'no'
    """'bf16' loads the base model in bfloat16. The services have a separate setting."""
    where: Literal['in-process', 'services'] = 'in-process'
    examples: int = 32
    """Number of examples used from the file."""
    epochs: int = 3
    batch_size: int = 8
    lora_rank: int = 8
    learning_rate: float = 3e-3


CPU = Setting()
GPU = Setting(
    model='hf://Qwen/Qwen3-4B',
    precision='bf16',
    examples=103,
    epochs=6,
    batch_size=16,
    learning_rate=2e-4,
    lora_rank=16,
)

if __name__ == '__main__':
    check_options('sft_self_cognition', __doc__, {'cpu': CPU, 'gpu': GPU})

from examples.cookbook.curves import Curves
from twinkle.data_format import LoraConfig

DATA = 'examples/data/self_cognition.jsonl'
NAME, AUTHOR = 'Twinkle', 'the Twinkle team'
HELD_OUT = ('And you are?', 'So who is this, then?', 'Under what name do they run you?', 'Whom do I speak with?')


@dataclass(frozen=True, kw_only=True)
class Components:
    """Components of the training loop, from `twinkle` or from `twinkle_client`."""

    model: Any
    sampler: Any
    Dataset: Any
    DatasetMeta: Any
    DataLoader: Any
    CheckpointEngineManager: Any


@contextmanager
def in_process(setting: Setting) -> Iterator[Components]:
    """Import the components from the library, which runs everything in this process."""
    # Imported here, because a client of the services does not need torch.
    from twinkle.checkpoint_engine import CheckpointEngineManager  # noqa: PLC0415
    from twinkle.dataloader import DataLoader  # noqa: PLC0415
    from twinkle.dataset import Dataset, DatasetMeta  # noqa: PLC0415
    from twinkle.model import MultiLoraTransformersModel  # noqa: PLC0415
    from twinkle.sampler import TorchSampler  # noqa: PLC0415

    model = MultiLoraTransformersModel(setting.model, mixed_precision=setting.precision)
    yield Components(
        model=model,
        sampler=TorchSampler(setting.model, model=model.engine.model),
        Dataset=Dataset,
        DatasetMeta=DatasetMeta,
        DataLoader=DataLoader,
        CheckpointEngineManager=CheckpointEngineManager,
    )


@contextmanager
def services(setting: Setting) -> Iterator[Components]:
    """Import the components from the client, which runs everything on the services."""
    from examples.cookbook.serving import connected  # noqa: PLC0415
    from twinkle_client.checkpoint_engine import CheckpointEngineManager  # noqa: PLC0415
    from twinkle_client.dataloader import DataLoader  # noqa: PLC0415
    from twinkle_client.dataset import Dataset, DatasetMeta  # noqa: PLC0415
    from twinkle_client.model import MultiLoraTransformersModel  # noqa: PLC0415
    from twinkle_client.sampler import Sampler  # noqa: PLC0415

    with connected(setting.model):
        yield Components(
            model=MultiLoraTransformersModel(setting.model),
            sampler=Sampler(setting.model),
            Dataset=Dataset,
            DatasetMeta=DatasetMeta,
            DataLoader=DataLoader,
            CheckpointEngineManager=CheckpointEngineManager,
        )


SOURCES = {'in-process': in_process, 'services': services}


def main() -> None:
    """Run the recipe."""
    run_recipe('sft_self_cognition', __doc__, {'cpu': CPU, 'gpu': GPU}, train)


def train(recipe: Recipe[Setting]) -> None:
    """Train in process or with the services, according to the setting."""
    with SOURCES[recipe.setting.where](recipe.setting) as components:
        teach(recipe, components)


def teach(recipe: Recipe[Setting], components: Components) -> None:
    """Evaluate, train, and evaluate again."""
    setting, model = recipe.setting, components.model
    dataset = components.Dataset(components.DatasetMeta(DATA, data_slice=range(setting.examples)))
    dataset.set_template('Template', model_id=setting.model, max_length=256)
    dataset.map('SelfCognitionProcessor', init_args={'model_name': NAME, 'model_author': AUTHOR})
    dataset.encode()
    steps = setting.epochs * (len(dataset) // setting.batch_size)
    model.add_adapter_to_model('default', LoraConfig(r=setting.lora_rank, lora_alpha=16, seed=recipe.seed))
    model.set_optimizer('AdamW', lr=setting.learning_rate)
    model.set_lr_scheduler('CosineWarmupScheduler', num_warmup_steps=2, num_training_steps=steps + 2)
    manager = components.CheckpointEngineManager(model=model, sampler=components.sampler)
    metrics = model.metrics() if setting.where == 'services' else None
    title, plotted = 'SFT: the model learns its name', ['loss', 'named']
    with Curves(recipe, title=title, total_steps=steps + 2, plotted=plotted, metrics=metrics) as curves:
        curves.record(named=named_fraction(components))
        for epoch in range(setting.epochs):
            seed = 1000 * recipe.seed + epoch
            options = {'batch_size': setting.batch_size, 'shuffle': True, 'seed': seed, 'drop_last': True}
            for batch in components.DataLoader(dataset, **options):
                output = model.forward_backward(batch)
                model.clip_grad_and_step(1.0)
                curves.record(loss=output['loss'])
        manager.sync_weights(merge_and_sync=False)
        curves.record(named=named_fraction(components))


def named_fraction(components: Components) -> float:
    """Answer the held-out questions; return the fraction of answers that contain the name."""
    chats = [{'messages': [{'role': 'user', 'content': question}]} for question in HELD_OUT]
    responses = components.sampler.sample(chats, {'max_tokens': 24, 'temperature': 0.0})
    answers = [response.sequences[0].decoded for response in responses]
    for question, answer in zip(HELD_OUT, answers, strict=True):
        print(f'  {question}  {answer!r}')
    return sum(NAME in answer for answer in answers) / len(answers)


if __name__ == '__main__':
    main()
