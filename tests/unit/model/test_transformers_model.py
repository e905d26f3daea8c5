"""Tests of `TransformersModel`."""

import json
import os
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from fixtures.peft_oracle import label_logprobs
from fixtures.tiny_model import MAX_POSITIONS
from twinkle import get_device_placement, get_logger
from twinkle.component import UnknownComponent
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
from twinkle.patch import PatchError
from twinkle.preprocessor import SelfCognitionProcessor

SEED_QUESTIONS = [
    {'query': f'Who are you? ({n})', 'response': 'I am {{NAME}} by {{AUTHOR}}.', 'tag': 'en'} for n in range(24)
]


@pytest.fixture
def trainer(tiny_llama_dir: Path) -> TransformersModel:
    """Trainer with one adapter, 'default'."""
    trainer = TransformersModel(str(tiny_llama_dir))
    trainer.add_adapter_to_model('default', LoraConfig(r=4, lora_dropout=0.1, seed=1))
    trainer.set_optimizer('AdamW', lr=1e-2)
    return trainer


def build_mirror(folder: Path, model_dir: Path) -> None:
    """Create a local mirror of a hub with the quick start's model and dataset."""
    (folder / 'models' / 'Qwen').mkdir(parents=True)
    (folder / 'models' / 'Qwen' / 'Qwen3.5-4B').symlink_to(model_dir)
    dataset_dir = folder / 'datasets' / 'swift' / 'self-cognition'
    dataset_dir.mkdir(parents=True)
    (dataset_dir / 'train.jsonl').write_text('\n'.join(json.dumps(row) for row in SEED_QUESTIONS))


def test_repr_shows_the_adapters(trainer: TransformersModel, tiny_llama_dir: Path) -> None:
    """The text of a model shows its id, adapters and device."""
    device = str(trainer.engine.model.device)
    expected = f'TransformersModel({str(tiny_llama_dir)!r}, adapters=[{"default"!r}], device={device!r})'
    assert repr(trainer) == expected


def test_the_single_device_program_of_the_quick_start_runs(tiny_qwen3_dir, tmp_path, monkeypatch):
    """The quick start's training loop runs with its hub ids, which a local mirror serves."""
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


def test_resume_from_a_folder_continues_bitwise(trainer, tiny_llama_dir, tmp_path, make_feature):
    """A checkpoint with an optimizer that another trainer resumes gives bitwise the same weights and counters."""
    features = [make_feature(10 + step, step) for step in range(6)]
    for feature in features[:3]:
        trainer.forward_backward([feature])
        trainer.clip_grad_and_step()
    folder = trainer.save('middle', str(tmp_path), save_optimizer=True, consumed_train_samples=3)
    other = TransformersModel(str(tiny_llama_dir))
    other.add_adapter_to_model('resumed', LoraConfig(r=4, lora_dropout=0.1, seed=99))
    assert other.resume_from_checkpoint(folder) == {
        'cur_step': 3, 'gradient_accumulation_steps': 1, 'consumed_train_samples': 3,
    }  # fmt: skip
    for model in (trainer, other):
        for feature in features[3:]:
            model.forward_backward(feature)
            model.clip_grad_and_step()
    expected, resumed = trainer.get_state_dict(), other.get_state_dict()
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)


def test_load_without_optimizer(trainer, tmp_path, make_feature):
    """A checkpoint without an optimizer can be loaded but not resumed; absent folders and invalid names are refused."""
    trainer.forward_backward([make_feature()])
    trainer.clip_grad_and_step()
    saved = trainer.get_state_dict()
    folder = trainer.save('plain', str(tmp_path))
    trainer.forward_backward([make_feature(9, 9)])
    trainer.clip_grad_and_step()
    trainer.load('plain', str(tmp_path))
    assert all(torch.equal(saved[name], tensor) for name, tensor in trainer.get_state_dict().items())
    with pytest.raises(SnapshotMismatch):
        trainer.resume_from_checkpoint(folder)
    with pytest.raises(SnapshotMismatch):
        trainer.load('absent', str(tmp_path))
    for name in ('../elsewhere', '..', '.', ''):
        with pytest.raises(InvalidArgument):
            trainer.save(name, str(tmp_path))


def test_load_accepts_the_path_of_save(trainer, tmp_path, make_feature):
    """`load(save(...))` restores the weights, with an absolute path and with a relative path."""
    for parent in (tmp_path / 'saved', Path(os.path.relpath(tmp_path)) / 'also'):
        trainer.forward_backward([make_feature()])
        trainer.clip_grad_and_step()
        saved = trainer.get_state_dict()
        folder = trainer.save('plain', str(parent))
        trainer.forward_backward([make_feature(9, 9)])
        trainer.clip_grad_and_step()
        trainer.load(folder)
        assert all(torch.equal(saved[name], tensor) for name, tensor in trainer.get_state_dict().items())


def test_an_adapter_can_start_from_a_peft_folder(trainer, tiny_llama_dir, tmp_path, make_feature):
    """An adapter can start with the weights of a peft folder."""
    trainer.forward_backward([make_feature()])
    trainer.clip_grad_and_step()
    folder = trainer.save('begin', str(tmp_path))
    other = MultiLoraTransformersModel(str(tiny_llama_dir))
    other.add_adapter_to_model('b', folder)
    saved = trainer.get_state_dict()
    assert all(torch.equal(saved[name], tensor) for name, tensor in other.get_state_dict().items())


def test_peft_configuration_is_accepted(tiny_llama_dir):
    """A peft.LoraConfig is converted to an equal configuration of this library."""
    model = TransformersModel(str(tiny_llama_dir))
    model.add_adapter_to_model('p', peft.LoraConfig(r=2, lora_alpha=5, target_modules=['q_proj'], use_rslora=True))
    config = model.engine.adapter('p').config
    assert (config.r, config.lora_alpha, config.target_modules, config.use_rslora) == (2, 5, ('q_proj',), True)


def test_adapter_name_is_required_for_several_adapters(trainer, make_feature):
    """The adapter's name is optional for one adapter and required for several."""
    trainer.forward_only(make_feature())
    trainer.add_adapter_to_model('second', LoraConfig(r=2))
    with pytest.raises(InvalidArgument, match='adapter_name'):
        trainer.forward_only(make_feature())
    with pytest.raises(UnknownAdapter):
        trainer.step(adapter_name='third')
    assert trainer.forward_only(make_feature(), adapter_name='second')['num_tokens'] == 8


def test_unsupported_options_are_refused(tiny_llama_dir, make_feature):
    """Training without an adapter and unsupported strategies are refused."""
    model = TransformersModel(str(tiny_llama_dir))
    for call in (
        lambda: model.forward_backward(make_feature()),
        lambda: TransformersModel(str(tiny_llama_dir), strategy='native_fsdp'),
    ):
        with pytest.raises(NotSupportedYet):
            call()


def test_optimizer_without_adapter_trains_the_whole_model(tiny_llama_dir, make_feature, tmp_path):
    """An optimizer without an adapter starts full-parameter training; a refused optimizer does not start it."""
    model = TransformersModel(str(tiny_llama_dir))
    with pytest.raises(UnknownComponent):
        model.set_optimizer('NoSuchOptimizer')
    assert list(model.engine.adapter_ids) == []
    model.set_optimizer('AdamW', lr=1e-2)
    model.forward_backward(make_feature())
    model.clip_grad_and_step()
    name = 'model.layers.0.mlp.up_proj.weight'
    saved = load_file(Path(model.save('whole', output_dir=str(tmp_path))) / 'model.safetensors')[name]
    assert not np.array_equal(saved, load_file(tiny_llama_dir / 'model.safetensors')[name])


def test_patch_is_undone_bitwise_and_refused_after_adapters(tiny_llama_dir, make_feature):
    """A patch is undone bitwise, and is refused once adapters exist."""
    feature = make_feature(length=40)

    def logps(model):
        model.add_adapter_to_model('a', LoraConfig(r=2, seed=1))
        found = model.forward_only(feature)['logps']
        model.remove_adapter('a')
        return torch.as_tensor(np.concatenate(found))

    model = TransformersModel(str(tiny_llama_dir))
    plain = logps(model)
    patch = model.apply_patch('RopeScalingPatch', factor=4.0)
    assert not torch.equal(logps(model), plain)
    assert model.engine.model.max_position_embeddings == 4 * MAX_POSITIONS
    patch.unpatch()
    assert torch.equal(logps(model), plain)
    model.add_adapter_to_model('b', LoraConfig(r=2))
    for refused, error in (('RopeScalingPatch', PatchError), ('NoPatch', PatchError)):
        with pytest.raises(error):
            model.apply_patch(refused, factor=4.0)


def test_chats_need_a_template(trainer):
    """The adapter's template encodes chats; without a template, chats are refused."""
    chat = {'messages': [{'role': 'user', 'content': 'hello'}, {'role': 'assistant', 'content': 'hi there'}]}
    with pytest.raises(AdapterNotReady):
        trainer.forward_backward([chat])
    trainer.set_template('Template')
    assert trainer.forward_backward([chat])['num_tokens'] > 0


def test_a_function_may_be_the_loss(trainer, make_feature):
    """A function can be the loss; it receives the labels' log-probabilities, and its loss and metrics are reported."""
    seen = []

    def loss(batch):
        seen.append(len(batch.labels_R))
        return LossOutput(loss=(batch.logps_R**2).sum(), num_tokens=0, metrics={'largest': batch.logps_R.min().item()})

    trainer.set_loss(loss)
    output = trainer.forward_backward([make_feature(12)])
    assert seen == [8]
    assert output['loss'] == pytest.approx(float(np.sum(output['logps'][0][4:] ** 2)), rel=1e-5)
    assert trainer.calculate_metric()['largest'] < 0


def test_streams_as_arguments(trainer, make_feature):
    """Advantages per example, label or token, or in a sampler's format, give one loss; malformed ones are refused."""
    features = [make_feature(12, 1), make_feature(9, 2)]
    trainer.set_loss('GRPOLoss', epsilon=0.2)
    counts = [int((feature['labels'] != -100).sum()) for feature in features]
    full = [np.where(feature['labels'] != -100, 0.5, 0.0) for feature in features]
    forms = [
        [0.5, 0.5],
        [[0.5] * count for count in counts],
        full,
        [[[(7, 0.5), (8, -1.0)]] * count for count in counts],
    ]
    losses = {trainer.forward_only(features, advantages=form)['loss'] for form in forms}
    with_advantages = [{**feature, 'advantages': values} for feature, values in zip(features, full, strict=True)]
    assert losses == {trainer.forward_only(with_advantages)['loss']}
    with pytest.raises(InvalidArgument, match='entries'):
        trainer.forward_only(features, advantages=[0.5])
    with pytest.raises(InvalidArgument, match='advantages'):
        trainer.forward_only(features, advantages=[[0.5, 0.5], 0.5])
    with pytest.raises(InvalidArgument, match='advantage_s'):
        trainer.forward_only(features, advantage_s=[0.5, 0.5])


def test_logits_and_embeddings_on_request(trainer, make_feature):
    """Logits, embeddings and values are returned on request, as one array for the batch."""
    features = [make_feature(12, 1), make_feature(9, 2)]
    output = trainer.forward_only(features, return_logits=True, temperature=0.7)
    assert output['logits'].shape == (2, 12, 320)
    logps = torch.from_numpy(output['logits'][1]).log_softmax(-1)[torch.arange(9), features[1]['labels'].clip(0)]
    is_label = features[1]['labels'] != -100
    np.testing.assert_allclose(logps.numpy()[is_label], output['logps'][1][is_label], atol=1e-5)
    embeddings = trainer.forward_only([{'input_ids': f['input_ids']} for f in features], task='embedding')['embeddings']
    assert embeddings.shape == (2, 64)
    trainer.set_loss('PPOValueLoss')
    numbers = {'returns': [0.5, 0.1], 'old_values': [0.0, 0.0]}
    assert trainer.forward_only(features, **numbers)['values'].shape == (2, 12)


def test_custom_loss_equals_the_built_in_loss(trainer, make_feature):
    """A custom function gives the gradient of the equal built-in loss; an invalid function adds no gradient."""
    trainer.remove_adapter('default')
    trainer.add_adapter_to_model('default', LoraConfig(r=4, seed=1))
    features = [make_feature(12, 1), make_feature(9, 2)]
    trainer.set_loss('CrossEntropyLoss', reduction='sum')
    expected = trainer.forward_backward(features)['loss']
    gradients = [parameter.grad.clone() for parameter in trainer.engine.adapter('default').parameters()]
    trainer.zero_grad()
    output = trainer.forward_backward_custom(features, lambda _, logps: (-sum(item.sum() for item in logps), {'n': 2}))
    assert (output['loss'], output['metrics']) == (pytest.approx(expected, rel=1e-6), {'n': 2.0})
    for parameter, other in zip(trainer.engine.adapter('default').parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, other, atol=1e-6, rtol=1e-5)
    trainer.zero_grad()
    with pytest.raises(ValueError, match='custom loss'):
        trainer.forward_backward_custom(features, lambda _, logps: torch.tensor(1.0))
    with pytest.raises(AdapterNotReady):
        trainer.backward()


def test_a_merged_model_gives_the_same_logprobs_in_plain_transformers(trainer, tmp_path, make_feature):
    """`merge_lora` saves a model that transformers can load; it cannot be combined with an optimizer."""
    feature = make_feature(12)
    for _ in range(2):
        trainer.forward_backward(feature)
        trainer.clip_grad_and_step()
    expected = trainer.forward_only(feature)['logps'][0]
    folder = trainer.save('merged', str(tmp_path), merge_lora=True)
    merged = AutoModelForCausalLM.from_pretrained(folder)
    own = label_logprobs(merged, list(feature['input_ids']), list(feature['labels']))
    np.testing.assert_allclose(own.detach().numpy(), expected, atol=1e-4)
    with pytest.raises(InvalidArgument, match='merged'):
        trainer.save('merged', str(tmp_path), merge_lora=True, save_optimizer=True)


def test_an_adapter_can_start_from_an_external_peft_folder(trainer, tiny_llama_dir, tmp_path, make_feature):
    """An adapter that peft saved gives peft's log-probabilities in this library, and can be trained further."""
    config = peft.LoraConfig(r=3, lora_alpha=9, target_modules=['q_proj', 'down_proj'], init_lora_weights=False)
    plain = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_llama_dir), config)
    plain.save_pretrained(tmp_path / 'external')
    trainer.add_adapter_to_model('external', str(tmp_path / 'external'))
    feature = make_feature(12)
    own = trainer.forward_only(feature, adapter_name='external')['logps'][0]
    expected = label_logprobs(plain, list(feature['input_ids']), list(feature['labels']))
    np.testing.assert_allclose(own, expected.detach().numpy(), atol=2e-5)
    trainer.forward_backward(feature, adapter_name='external')
    assert trainer.clip_grad_and_step(adapter_name='external').is_applied
    trainer.remove_adapter('external')


def test_checkpointed_activations_do_not_change_results(tiny_llama_dir, make_feature):
    """Activation checkpointing gives bitwise the same losses and weights, including dropout."""
    results = []
    for is_checkpointed in (False, True):
        model = TransformersModel(str(tiny_llama_dir), activation_checkpointing=is_checkpointed)
        model.add_adapter_to_model('a', LoraConfig(r=4, lora_dropout=0.3, seed=1))
        losses = []
        for seed in range(2):
            losses.append(model.forward_backward([make_feature(20, seed), make_feature(7, seed)])['loss'])
            model.clip_grad_and_step()
        state = model.get_state_dict()
        results.append((losses, {name: tensor.numpy().tobytes() for name, tensor in state.items()}))
    assert results[0] == results[1]


def test_a_step_reports_health_on_request(trainer, make_feature):
    """A step reports the health of each layer on request."""
    trainer.forward_backward(make_feature())
    result = trainer.clip_grad_and_step(max_grad_value=0.1, return_health=True)
    assert len(result.layers) == len(trainer.engine.model.layers)
    assert result.grad_norm is not None


def test_grpo_metric_measures_entropies_on_request(trainer: TransformersModel, tiny_llama_dir):
    """`GRPOMetric` reports the mean entropy on request, even if the loss does not use it."""
    ids, labels = np.arange(5, 12), np.arange(6, 13)
    feature = {'input_ids': ids, 'labels': labels, 'old_logps': np.zeros(7, np.float32), 'advantages': np.ones(7)}
    trainer.set_loss('GRPOLoss')
    trainer.add_metric('GRPOMetric')
    trainer.forward_backward([feature])
    assert 'train/entropy' not in trainer.calculate_metric(is_training=True)
    trainer.add_metric('GRPOMetric', is_entropy_measured=True)
    trainer.forward_backward([feature])
    # A new adapter does not change results, so the base model gives the expected value.
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir, dtype=torch.float32)
    with torch.no_grad():
        logps = model(torch.tensor(ids)[None]).logits[0].log_softmax(-1)
    expected = float(-(logps.exp() * logps).sum(-1).mean())
    assert trainer.calculate_metric(is_training=True)['train/entropy'] == pytest.approx(expected, rel=1e-5)
