"""Adapters of the output head, and groups of target layers."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from fixtures.engine_runs import make_engine, run_all
from fixtures.peft_oracle import build_peft_model, label_logprobs, lora_gradients
from twinkle.data_format import LoraConfig, SamplingParams
from twinkle.loss import build_loss
from twinkle.model.engine import BatchItem, ForwardOptions, TrainerEngine
from twinkle.nn import (
    AdapterSpan,
    LoraWeights,
    PackedCausalLM,
    SequenceSpan,
    UnknownTargetModules,
    UnsupportedModel,
    load_adapter,
    merged_parameters,
    save_adapter,
)
from twinkle.nn.targets import TargetLayers, select_layers
from twinkle.sampler.engine import EngineAdapter

HEAD = LoraConfig(r=4, lora_alpha=12, target_modules=('output-head', 'q_proj'), seed=1)
PROMPT = [5, 9, 17, 33, 64]


@pytest.fixture(params=['tiny_llama_dir', 'tiny_qwen3_dir'], ids=['tied', 'untied'])
def folder(request: pytest.FixtureRequest) -> Path:
    """Folder of a model with a tied head, and of a model with an untied head."""
    return request.getfixturevalue(request.param)


def new_engine(folder: Path, configs: dict[str, LoraConfig], **options) -> TrainerEngine:
    """Return a trainer whose adapters have a nonzero B."""
    engine = TrainerEngine(PackedCausalLM.load(folder), **options)
    for index, (name, config) in enumerate(configs.items()):
        generator = torch.Generator().manual_seed(index)
        for factors in engine.create_adapter(name, config).weights.factors.values():
            with torch.no_grad():
                factors.b.copy_(0.05 * torch.randn(factors.b.shape, generator=generator))
    return engine


def make_feature(length: int = 30, seed: int = 0):
    """Return a feature of random tokens; its first third has no labels."""
    ids = np.random.default_rng(seed).integers(3, 300, length + 1)
    labels = ids[1:].copy()
    labels[: length // 3] = -100
    return {'input_ids': ids[:-1], 'labels': labels}


def gradients_of(engine: TrainerEngine, name: str) -> list[bytes]:
    """Return the accumulated gradients as bytes."""
    return [item.grad.numpy().tobytes() for item in engine.adapter(name).parameters()]


@pytest.mark.filterwarnings('ignore:.*tie:UserWarning')  # peft warns that merging would change the embeddings
def test_gradients_equal_peft(folder):
    """Log-probabilities and all gradients, including those of the head, equal those of transformers with peft."""
    engine = new_engine(folder, {'a': HEAD})
    feature, weights = make_feature(200), engine.adapter('a').weights
    config = peft.LoraConfig(r=4, lora_alpha=12, target_modules=['lm_head', 'q_proj'])
    oracle = build_peft_model(folder, config, weights.peft_state())
    expected = label_logprobs(oracle, feature['input_ids'].tolist(), feature['labels'].tolist())
    (-expected.sum()).backward()
    result = engine.forward_backward('a', [feature], loss=build_loss('cross_entropy'))
    np.testing.assert_allclose(result.logps[0], expected.detach().numpy(), atol=2e-5, rtol=1e-5)
    gradients = lora_gradients(oracle)
    assert {name.removesuffix('.weight') for name in gradients} >= {f'base_model.model.lm_head.lora_{x}' for x in 'AB'}
    for name, tensor in weights.named_parameters().items():
        torch.testing.assert_close(tensor.grad, gradients[name], atol=2e-4, rtol=1e-4, msg=name)


@pytest.mark.parametrize('dropout', [0.0, 0.3])
def test_packed_results_are_bitwise_equal_to_separate_results(folder, dropout):
    """Adapters with and without a head update get bitwise the same results together and alone."""
    config = replace(HEAD, lora_dropout=dropout)
    configs = {'a': config, 'b': LoraConfig(r=2, seed=2), 'c': replace(config, r=1, seed=3)}
    ids = np.random.default_rng(3).integers(3, 300, (40, 3))
    targets = {'target_ids': ids, 'target_weights': np.ones((40, 3), np.float32)}
    items = [
        BatchItem(adapter_id='a', features=[make_feature(30, 1), make_feature(50, 2)], is_training=True),
        BatchItem(adapter_id='b', features=[make_feature(20, 3)], is_training=True),
        BatchItem(
            adapter_id='c',
            features=[{**make_feature(40, 4), **targets}],
            is_training=True,
            loss=build_loss('cross_entropy'),
        ),
    ]
    together, alone = (new_engine(folder, configs, max_pass_tokens=100) for _ in range(2))
    results = together.run_batch(items)
    for item, result in zip(items, results, strict=True):
        (expected,) = alone.run_batch([item])
        assert result.loss_sum == expected.loss_sum
        assert gradients_of(together, item.adapter_id) == gradients_of(alone, item.adapter_id)


def test_training_leaves_the_base_and_its_embeddings(folder):
    """Training a head adapter lowers the loss and leaves the base weights unchanged, even a tied embedding."""
    engine = new_engine(folder, {'a': replace(HEAD, target_modules='output-head')})
    before = {name: item.detach().clone() for name, item in engine.model.base_parameters.items()}
    engine.set_optimizer('a', 'AdamW', lr=1e-2)
    losses = []
    for _ in range(5):
        losses.append(engine.forward_backward('a', [make_feature()]).loss)
        engine.clip_grad_and_step('a')
    assert losses[-1] < losses[0]
    assert all(torch.equal(item, before[name]) for name, item in engine.model.base_parameters.items())


def test_a_disabled_adapter_does_not_change_the_head(folder):
    """A disabled adapter with a head update does not change the log-probabilities."""
    engine = new_engine(folder, {'a': HEAD, 'b': replace(HEAD, seed=8)})
    options = ForwardOptions(is_adapter_disabled=True)
    own, other = (engine.forward_only(name, [make_feature()], options=options) for name in 'ab')
    np.testing.assert_array_equal(own.logps[0], other.logps[0])
    assert not np.array_equal(own.logps[0], engine.forward_only('a', [make_feature()]).logps[0])


def test_sampler_and_trainer_agree_on_log_probabilities(folder):
    """Sampled tokens and prompts have the log-probabilities that the trainer computes."""
    trainer = new_engine(folder, {'a': HEAD})
    adapter = EngineAdapter(key='a', version=1, weights=trainer.adapter('a').weights)
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=3, logprobs=1, prompt_logprobs=1)
    engine = make_engine(PackedCausalLM.load(folder))
    results = run_all(engine, {'own': (PROMPT, params, adapter), 'base': (PROMPT, params, None)})
    tokens = results['own'].tokens[0]
    whole = np.array(PROMPT + tokens)
    scored = trainer.forward_only('a', [{'input_ids': whole[:-1], 'labels': whole[1:]}]).logps[0]
    sampled = [top[0][1] for top in results['own'].logprobs[0]]
    np.testing.assert_allclose(scored[len(PROMPT) - 1 :], sampled, atol=1e-5)
    np.testing.assert_allclose(scored[: len(PROMPT) - 1], results['own'].prompt.logprobs[1:], atol=1e-5)
    assert results['base'].logprobs != results['own'].logprobs


def test_peft_folder_contains_the_head(folder, tmp_path):
    """Target groups are saved as layer names; this library and peft read the folder."""
    engine = new_engine(folder, {'a': HEAD})
    weights = engine.adapter('a').weights
    save_adapter(weights, tmp_path / 'out', base_model=str(folder))
    assert sorted(peft.LoraConfig.from_pretrained(tmp_path / 'out').target_modules) == ['lm_head', 'q_proj']
    loaded = load_adapter(tmp_path / 'out', engine.model.targets)
    for name, tensor in weights.peft_state().items():
        assert torch.equal(tensor, loaded.peft_state()[name])


@pytest.mark.filterwarnings('ignore:.*tie:UserWarning')  # peft warns that merging would change the embeddings
def test_peft_computes_the_logits_of_a_trained_head_from_its_folder(folder, tmp_path):
    """Plain peft opens the saved folder of a trained head and computes the same logits as this library."""
    engine, feature = new_engine(folder, {'a': HEAD}), make_feature(40)
    before = logits_of(engine, feature)
    engine.set_optimizer('a', 'AdamW', lr=1e-2)
    for _ in range(3):
        engine.forward_backward('a', [feature])
        engine.clip_grad_and_step('a')
    save_adapter(engine.adapter('a').weights, tmp_path / 'out', base_model=str(folder))
    base = AutoModelForCausalLM.from_pretrained(folder, attn_implementation='eager')
    with torch.no_grad():
        loaded = peft.PeftModel.from_pretrained(base, tmp_path / 'out').eval()
        expected = loaded(input_ids=torch.from_numpy(feature['input_ids'])[None]).logits[0]
    found = logits_of(engine, feature)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(found, before, atol=1e-2)


def logits_of(engine: TrainerEngine, feature) -> torch.Tensor:
    """Return the logits of a feature with the adapter 'a', float32 [tokens, vocabulary]."""
    rows = len(feature['input_ids'])
    spans = [AdapterSpan(0, rows, engine.adapter('a').weights)]
    ids, positions = torch.from_numpy(feature['input_ids']), torch.arange(rows)
    with torch.no_grad():
        hidden = engine.model.hidden(ids, positions, sequences=[SequenceSpan(0, rows)], adapters=spans)
        return engine.model.logits(hidden, adapters=spans)


def test_a_tied_head_cannot_be_merged(tiny_llama_dir, tiny_qwen3_dir):
    """Merging refuses an adapter of a tied head and accepts an adapter of an untied head."""
    engine = new_engine(tiny_llama_dir, {'a': HEAD})
    with pytest.raises(UnsupportedModel):
        merged_parameters(engine.model, engine.adapter('a').weights)
    engine = new_engine(tiny_qwen3_dir, {'a': HEAD})
    merged = merged_parameters(engine.model, engine.adapter('a').weights)
    assert not torch.equal(merged['lm_head.weight'], engine.model.base_parameters['lm_head.weight'])


LAYERS = {
    'llama': {'layers.0.self_attn.q_proj': 'a', 'layers.0.mlp.up_proj': 'm', 'lm_head': 'h'},
    'gpt-neox': {
        'layers.0.attention.query_key_value': 'a', 'layers.0.attention.dense': 'a', 'layers.0.mlp.dense_h_to_4h': 'm',
        'embed_out': 'h',
    },
    'opt': {'layers.0.self_attn.out_proj': 'a', 'layers.0.fc1': 'm', 'layers.0.fc2': 'm', 'lm_head': 'h'},
    'hybrid': {'layers.0.linear_attn.in_proj': 'a', 'layers.1.feed_forward.w1': 'm', 'output': 'h'},
}  # fmt: skip
"""Layers by architecture, each with the initial of its group: attention, MLP or head."""


@pytest.mark.parametrize('name', LAYERS)
@pytest.mark.parametrize(
    ('targets', 'groups'),
    [
        ('all-linear', 'am'),
        ('all-attention', 'a'),
        (('all-mlp',), 'm'),
        ('output-head', 'h'),
        (('all-mlp', 'output-head'), 'mh'),
        (('all-linear', 'output-head'), 'amh'),
        (('all-attention', 'all-mlp', 'output-head'), 'amh'),
    ],
)
def test_groups_are_found_in_the_modules_of_any_architecture(name, targets, groups):
    """Groups select the layers of any architecture in the model's order, with the head last."""
    own = LAYERS[name]
    body, (head,) = [path for path in own if own[path] != 'h'], [path for path in own if own[path] == 'h']
    layers = TargetLayers(dict.fromkeys(body, (4, 4)), head=head, shape=(4, 9))
    chosen = select_layers(layers, LoraConfig(target_modules=targets))
    assert chosen == [path for path in own if own[path] in groups]


def test_groups_mix_with_names_and_unknown_names_are_refused(tiny_llama_dir):
    """Groups and layer names can be combined; a name that matches nothing is refused."""
    model = PackedCausalLM.load(tiny_llama_dir)
    mixed = LoraWeights.create(model.targets, LoraConfig(target_modules=('all-mlp', 'q_proj')), seed=0)
    assert {path.rpartition('.')[2] for path in mixed.factors} == {'q_proj', 'gate_proj', 'up_proj', 'down_proj'}
    with pytest.raises(UnknownTargetModules):
        LoraWeights.create(model.targets, LoraConfig(target_modules=('all-mlp', 'unknown')), seed=0)
    with pytest.raises(UnknownTargetModules):
        LoraWeights.create(model.layers, LoraConfig(target_modules='output-head'), seed=0)


def test_head_weights_are_initialized_last(tiny_llama_dir):
    """The head's weights are initialized last, so that a head does not change other layers' initial weights."""
    model = PackedCausalLM.load(tiny_llama_dir)
    plain = LoraWeights.create(model.targets, LoraConfig(), seed=5).peft_state()
    more = LoraWeights.create(model.targets, LoraConfig(target_modules=('all-linear', 'output-head')), seed=5)
    assert all(torch.equal(tensor, more.peft_state()[name]) for name, tensor in plain.items())
