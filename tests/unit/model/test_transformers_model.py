"""The classes a training loop is written with."""

import json
from pathlib import Path

import numpy as np
import peft
import pytest
import torch

from twinkle import get_device_placement, get_logger
from twinkle.data_format import LoraConfig, LossOutput
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.infra import NotSupportedYet
from twinkle.model import (
    AdapterNotReady,
    InvalidArgument,
    MultiLoraTransformersModel,
    SnapshotMismatch,
    TransformersModel,
    UnknownAdapter,
)
from twinkle.preprocessor import SelfCognitionProcessor

SEED_QUESTIONS = [
    {'query': f'Who are you? ({n})', 'response': 'I am {{NAME}} by {{AUTHOR}}.', 'tag': 'en'} for n in range(24)
]


@pytest.fixture
def trainer(tiny_llama_dir: Path) -> TransformersModel:
    """A trainer with one adapter, 'default'."""
    trainer = TransformersModel(str(tiny_llama_dir))
    trainer.add_adapter_to_model('default', LoraConfig(r=4, lora_dropout=0.1, seed=1))
    trainer.set_optimizer('AdamW', lr=1e-2)
    return trainer


def build_mirror(folder: Path, model_dir: Path) -> None:
    """Put the quick start's model and dataset where its ids resolve to them."""
    (folder / 'models' / 'Qwen').mkdir(parents=True)
    (folder / 'models' / 'Qwen' / 'Qwen3.5-4B').symlink_to(model_dir)
    dataset_dir = folder / 'datasets' / 'swift' / 'self-cognition'
    dataset_dir.mkdir(parents=True)
    (dataset_dir / 'train.jsonl').write_text('\n'.join(json.dumps(row) for row in SEED_QUESTIONS))


def test_the_single_device_program_of_the_quick_start_runs(tiny_qwen3_dir, tmp_path, monkeypatch):
    """The seed document's loop runs as written, with its hub ids in a local mirror."""
    build_mirror(tmp_path, tiny_qwen3_dir)
    monkeypatch.setenv('TWINKLE_HUB_DIR', str(tmp_path))
    monkeypatch.chdir(tmp_path)

    logger = get_logger()
    dataset = Dataset(dataset_meta=DatasetMeta('ms://swift/self-cognition', data_slice=range(20)))
    dataset.set_template('Qwen3_5Template', model_id='ms://Qwen/Qwen3.5-4B')
    dataset.map(SelfCognitionProcessor('twinkle LLM', 'ModelScope Community'))
    dataset.encode()
    dataloader = DataLoader(dataset=dataset, batch_size=8)
    model = TransformersModel(model_id='ms://Qwen/Qwen3.5-4B')
    lora_config = peft.LoraConfig(r=8, lora_alpha=32, target_modules='all-linear')
    model.add_adapter_to_model('default', lora_config, gradient_accumulation_steps=2)
    model.set_optimizer(optimizer_cls='AdamW', lr=1e-4)
    model.set_lr_scheduler(
        scheduler_cls='CosineWarmupScheduler', num_warmup_steps=5, num_training_steps=len(dataloader)
    )
    logger.info(get_device_placement())
    logger.info(model.get_train_configs())
    logger.info('Total steps: %d', len(dataloader))
    for step, batch in enumerate(dataloader):
        model.forward_backward(inputs=batch)
        model.clip_grad_and_step()
        if step % 20 == 0:
            metric = model.calculate_metric(is_training=True)
            logger.info('Current is step %d of %d, metric: %s', step, len(dataloader), metric)
    model.save('last-checkpoint')
    assert metric['loss'] > 0
    assert {'adapter_model.safetensors', 'adapter_config.json'} <= {
        path.name for path in (tmp_path / 'output' / 'last-checkpoint').iterdir()
    }


def test_resume_from_a_folder_continues_to_the_bit(trainer, tiny_llama_dir, tmp_path, draw_feature):
    """A checkpoint with its optimizer, resumed in another process's place, gives the same weights and counters."""
    features = [draw_feature(10 + step, step) for step in range(6)]
    for feature in features[:3]:
        trainer.forward_backward([feature])
        trainer.clip_grad_and_step()
    folder = trainer.save('middle', str(tmp_path), save_optimizer=True, consumed_train_samples=3)
    other = TransformersModel(str(tiny_llama_dir))
    other.add_adapter_to_model('mine', LoraConfig(r=4, lora_dropout=0.1, seed=99))
    assert other.resume_from_checkpoint(folder) == {
        'cur_step': 3, 'gradient_accumulation_steps': 1, 'consumed_train_samples': 3,
    }  # fmt: skip
    for model in (trainer, other):
        for feature in features[3:]:
            model.forward_backward(feature)
            model.clip_grad_and_step()
    expected, resumed = trainer.get_state_dict(), other.get_state_dict()
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)


def test_load_takes_the_weights_alone(trainer, tmp_path, draw_feature):
    """A checkpoint without an optimizer loads, and cannot be resumed."""
    trainer.forward_backward([draw_feature()])
    trainer.clip_grad_and_step()
    saved = trainer.get_state_dict()
    folder = trainer.save('plain', str(tmp_path))
    trainer.forward_backward([draw_feature(9, 9)])
    trainer.clip_grad_and_step()
    trainer.load('plain', str(tmp_path))
    assert all(torch.equal(saved[name], tensor) for name, tensor in trainer.get_state_dict().items())
    with pytest.raises(SnapshotMismatch):
        trainer.resume_from_checkpoint(folder)
    with pytest.raises(SnapshotMismatch):
        trainer.load('absent', str(tmp_path))
    with pytest.raises(InvalidArgument):
        trainer.save('../elsewhere', str(tmp_path))


def test_an_adapter_may_begin_from_a_peft_folder(trainer, tiny_llama_dir, tmp_path, draw_feature):
    """A folder in place of a configuration gives its weights."""
    trainer.forward_backward([draw_feature()])
    trainer.clip_grad_and_step()
    folder = trainer.save('begin', str(tmp_path))
    other = MultiLoraTransformersModel(str(tiny_llama_dir))
    other.add_adapter_to_model('b', folder)
    saved = trainer.get_state_dict()
    assert all(torch.equal(saved[name], tensor) for name, tensor in other.get_state_dict().items())


def test_peft_configuration_is_taken(tiny_llama_dir):
    """A peft.LoraConfig says the same as ours."""
    model = TransformersModel(str(tiny_llama_dir))
    model.add_adapter_to_model('p', peft.LoraConfig(r=2, lora_alpha=5, target_modules=['q_proj'], use_rslora=True))
    config = model.engine.adapter('p').config
    assert (config.r, config.lora_alpha, config.target_modules, config.use_rslora) == (2, 5, ('q_proj',), True)


def test_which_adapter_is_meant_must_be_clear(trainer, draw_feature):
    """One adapter needs no name, several do, none means full-parameter training, which is not there yet."""
    trainer.forward_only(draw_feature())
    trainer.add_adapter_to_model('second', LoraConfig(r=2))
    with pytest.raises(InvalidArgument, match='adapter_name'):
        trainer.forward_only(draw_feature())
    with pytest.raises(UnknownAdapter):
        trainer.step(adapter_name='third')
    assert trainer.forward_only(draw_feature(), adapter_name='second')['num_tokens'] == 8


def test_what_is_not_supported_yet_says_so(tiny_llama_dir, draw_feature):
    """Full-parameter training, other strategies, patches and uploads are refused clearly."""
    model = TransformersModel(str(tiny_llama_dir))
    for call in (
        lambda: model.forward_backward(draw_feature()),
        lambda: TransformersModel(str(tiny_llama_dir), remote_group='default'),
        lambda: model.apply_patch('SomePatch'),
        lambda: model.upload_to_hub('folder', 'hf://org/name'),
    ):
        with pytest.raises(NotSupportedYet):
            call()


def test_chats_need_a_template(trainer):
    """Chats are encoded by the adapter's template, which must be set first."""
    chat = {'messages': [{'role': 'user', 'content': 'hello'}, {'role': 'assistant', 'content': 'hi there'}]}
    with pytest.raises(AdapterNotReady):
        trainer.forward_backward([chat])
    trainer.set_template('Template')
    assert trainer.forward_backward([chat])['num_tokens'] > 0


def test_a_function_may_be_the_loss(trainer, draw_feature):
    """A loss of one's own gets the labels' log-probabilities and its number is what is reported."""
    seen = []

    def loss(batch):
        seen.append(len(batch.labels_R))
        return LossOutput(loss=(batch.logps_R**2).sum(), num_tokens=0, metrics={'largest': batch.logps_R.min().item()})

    trainer.set_loss(loss)
    output = trainer.forward_backward([draw_feature(12)])
    assert seen == [8]
    assert output['loss'] == pytest.approx(float(np.sum(output['logps'][0][4:] ** 2)), rel=1e-5)
    assert trainer.calculate_metric()['largest'] < 0


def test_multi_lora_is_bounded(tiny_llama_dir):
    """Adapters above max_loras or max_r are refused; one removed makes room."""
    model = MultiLoraTransformersModel(str(tiny_llama_dir), max_loras=1, max_r=8)
    with pytest.raises(InvalidArgument, match='max_r'):
        model.add_adapter_to_model('a', LoraConfig(r=4, rank_pattern={'q_proj': 16}))
    model.add_adapter_to_model('a', LoraConfig(r=4))
    with pytest.raises(InvalidArgument, match='max_loras'):
        model.add_adapter_to_model('b', LoraConfig(r=4))
    model.remove_adapter('a')
    model.add_adapter_to_model('b', LoraConfig(r=4))
