"""The classes a training loop is written with."""

import json
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
    """One adapter needs no name, several do."""
    trainer.forward_only(draw_feature())
    trainer.add_adapter_to_model('second', LoraConfig(r=2))
    with pytest.raises(InvalidArgument, match='adapter_name'):
        trainer.forward_only(draw_feature())
    with pytest.raises(UnknownAdapter):
        trainer.step(adapter_name='third')
    assert trainer.forward_only(draw_feature(), adapter_name='second')['num_tokens'] == 8


def test_what_is_not_supported_yet_says_so(tiny_llama_dir, draw_feature):
    """Training without an adapter and other strategies are refused clearly."""
    model = TransformersModel(str(tiny_llama_dir))
    for call in (
        lambda: model.forward_backward(draw_feature()),
        lambda: TransformersModel(str(tiny_llama_dir), strategy='native_fsdp'),
    ):
        with pytest.raises(NotSupportedYet):
            call()


def test_an_optimizer_without_an_adapter_is_for_the_model_itself(tiny_llama_dir, draw_feature, tmp_path):
    """As with `full_parameters=True`: other weights are saved; an optimizer that is refused begins nothing."""
    model = TransformersModel(str(tiny_llama_dir))
    with pytest.raises(UnknownComponent):
        model.set_optimizer('NoSuchOptimizer')
    assert list(model.engine.adapter_ids) == []
    model.set_optimizer('AdamW', lr=1e-2)
    model.forward_backward(draw_feature())
    model.clip_grad_and_step()
    name = 'model.layers.0.mlp.up_proj.weight'
    saved = load_file(Path(model.save('whole', output_dir=str(tmp_path))) / 'model.safetensors')[name]
    assert not np.array_equal(saved, load_file(tiny_llama_dir / 'model.safetensors')[name])


def test_a_shared_model_is_not_trained_by_mistake(tiny_llama_dir):
    """Where tenants share it, forgetting the adapter is refused."""
    with pytest.raises(NotSupportedYet):
        MultiLoraTransformersModel(str(tiny_llama_dir)).set_optimizer('AdamW', lr=1e-2)


def test_a_patch_is_in_a_model_before_its_adapters_and_undone_to_the_bit(tiny_llama_dir, draw_feature):
    """Under adapters, which were made for the model as it is, nothing is changed."""
    feature = draw_feature(length=40)

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


def test_numbers_beside_the_features_reach_the_loss(trainer, draw_feature):
    """One number an example, one a label, one a token, and a sampler's own form say the same."""
    features = [draw_feature(12, 1), draw_feature(9, 2)]
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
    carried = [{**feature, 'advantages': values} for feature, values in zip(features, full, strict=True)]
    assert losses == {trainer.forward_only(carried)['loss']}
    with pytest.raises(InvalidArgument, match='entries'):
        trainer.forward_only(features, advantages=[0.5])
    with pytest.raises(InvalidArgument, match='advantages'):
        trainer.forward_only(features, advantages=[[0.5, 0.5], 0.5])
    with pytest.raises(InvalidArgument, match='advantage_s'):
        trainer.forward_only(features, advantage_s=[0.5, 0.5])


def test_logits_and_embeddings_on_request(trainer, draw_feature):
    """Logits give the log-probabilities; an embedding task needs no labels; both are one array of the batch."""
    features = [draw_feature(12, 1), draw_feature(9, 2)]
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


def test_a_custom_loss_adds_what_the_same_loss_would(trainer, draw_feature):
    """A function of the log-probabilities gives the gradient that the built-in loss gives; a bad one adds nothing."""
    trainer.remove_adapter('default')
    trainer.add_adapter_to_model('default', LoraConfig(r=4, seed=1))
    features = [draw_feature(12, 1), draw_feature(9, 2)]
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


def test_a_merged_model_gives_the_same_logprobs_in_plain_transformers(trainer, tmp_path, draw_feature):
    """`merge_lora` writes a whole model that needs neither peft nor us, and refuses to keep an optimizer in it."""
    feature = draw_feature(12)
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


def test_an_external_peft_folder_begins_an_adapter(trainer, tiny_llama_dir, tmp_path, draw_feature):
    """What plain peft saved trains on here, and gives peft's own log-probabilities."""
    config = peft.LoraConfig(r=3, lora_alpha=9, target_modules=['q_proj', 'down_proj'], init_lora_weights=False)
    plain = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_llama_dir), config)
    plain.save_pretrained(tmp_path / 'external')
    trainer.add_adapter_to_model('external', str(tmp_path / 'external'))
    feature = draw_feature(12)
    own = trainer.forward_only(feature, adapter_name='external')['logps'][0]
    expected = label_logprobs(plain, list(feature['input_ids']), list(feature['labels']))
    np.testing.assert_allclose(own, expected.detach().numpy(), atol=2e-5)
    trainer.forward_backward(feature, adapter_name='external')
    assert trainer.clip_grad_and_step(adapter_name='external').is_applied
    trainer.remove_adapter('external')


def test_checkpointed_activations_change_no_bit(tiny_llama_dir, draw_feature):
    """Layers run again in the backward pass, dropout included, give the loss and gradient of kept activations."""
    results = []
    for is_checkpointed in (False, True):
        model = TransformersModel(str(tiny_llama_dir), activation_checkpointing=is_checkpointed)
        model.add_adapter_to_model('a', LoraConfig(r=4, lora_dropout=0.3, seed=1))
        losses = []
        for seed in range(2):
            losses.append(model.forward_backward([draw_feature(20, seed), draw_feature(7, seed)])['loss'])
            model.clip_grad_and_step()
        state = model.get_state_dict()
        results.append((losses, {name: tensor.numpy().tobytes() for name, tensor in state.items()}))
    assert results[0] == results[1]


def test_a_step_reports_health_on_request(trainer, draw_feature):
    """Each layer's gradient, weights and change."""
    trainer.forward_backward(draw_feature())
    result = trainer.clip_grad_and_step(max_grad_value=0.1, return_health=True)
    assert len(result.layers) == len(trainer.engine.model.layers)
    assert result.grad_norm is not None


def test_multi_lora_bounds_the_length(tiny_llama_dir, draw_feature):
    """Examples above max_length are refused by index."""
    model = MultiLoraTransformersModel(str(tiny_llama_dir), max_length=10)
    model.add_adapter_to_model('a', LoraConfig(r=4))
    model.forward_only(draw_feature(10))
    with pytest.raises(InvalidArgument, match=r'features\[1\]'):
        model.forward_only([draw_feature(10), draw_feature(11)])


def test_the_metric_of_rl_measures_entropies_where_it_is_asked_to(trainer: TransformersModel, tiny_llama_dir):
    """The mean entropy of the whole distribution, which the loss need not reward; unasked there is none."""
    ids, labels = np.arange(5, 12), np.arange(6, 13)
    feature = {'input_ids': ids, 'labels': labels, 'old_logps': np.zeros(7, np.float32), 'advantages': np.ones(7)}
    trainer.set_loss('GRPOLoss')
    trainer.add_metric('GRPOMetric')
    trainer.forward_backward([feature])
    assert 'train/entropy' not in trainer.calculate_metric(is_training=True)
    trainer.add_metric('GRPOMetric', is_entropy_measured=True)
    trainer.forward_backward([feature])
    # A fresh adapter changes nothing, so the base model alone says what is right.
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir, dtype=torch.float32)
    with torch.no_grad():
        logps = model(torch.tensor(ids)[None]).logits[0].log_softmax(-1)
    expected = float(-(logps.exp() * logps).sum(-1).mean())
    assert trainer.calculate_metric(is_training=True)['train/entropy'] == pytest.approx(expected, rel=1e-5)
