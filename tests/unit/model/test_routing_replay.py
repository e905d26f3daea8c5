"""Routing replay: recorded experts give the recorded results, and are unchanged when the routers change.

Legend: T tokens, L layers with experts, A experts per token.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from fixtures.architectures import build_tiny
from fixtures.mixture_model import CONFIG, build_mixture
from twinkle.data_format import InputFeature, LoraConfig
from twinkle.model import TransformersModel
from twinkle.model.engine import BatchItem, ForwardOptions, TrainerEngine
from twinkle.model.errors import InvalidArgument
from twinkle.nn import ExpertRouting, PackedCausalLM, PackError, RoutingShape
from twinkle.processor import InvalidFeatures

LORA = LoraConfig(r=4, seed=1, target_modules=('all-linear', 'all-experts'))
RECORDED = ForwardOptions(more_outputs=('routed_experts',))
SHAPE = (CONFIG.num_hidden_layers, CONFIG.num_experts_per_tok)


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a mixture of experts."""
    return build_mixture(tmp_path_factory.mktemp('mixture'))


@pytest.fixture
def engine(folder: Path) -> TrainerEngine:
    """Engine with two equal adapters."""
    engine = TrainerEngine(PackedCausalLM.load(folder))
    for name in 'ab':
        weights = engine.create_adapter(name, LORA).weights
        for factors in weights.factors.values():
            factors.b.detach().normal_(std=0.1, generator=torch.Generator().manual_seed(3))
    return engine


def features(**more) -> list[InputFeature]:
    """Return features of 20 and 7 tokens; each keyword argument has one value per feature."""
    rng = np.random.default_rng(0)
    found = []
    for index, length in enumerate((20, 7)):
        ids = rng.integers(1, 320, length + 1)
        own = {name: values[index] for name, values in more.items()}
        found.append(InputFeature(input_ids=ids[:-1], labels=ids[1:], **own))
    return found


def gradients(engine: TrainerEngine, name: str) -> list[torch.Tensor]:
    """Return the accumulated gradients of an adapter."""
    snapshot = engine.snapshot(name)
    return [torch.frombuffer(bytearray(part.data), dtype=torch.uint8) for part in snapshot.trainer.values()]


def perturb(engine: TrainerEngine) -> None:
    """Change the weights of all routers."""
    for name, weight in engine.model.base_parameters.items():
        if name.endswith('mlp.gate.weight'):
            weight.data += torch.randn(weight.shape, generator=torch.Generator().manual_seed(4))


def test_recorded_experts_give_bitwise_the_recorded_results(engine):
    """A training pass with the experts that its routers would choose gives the same loss, logps and gradients."""
    recorded = engine.forward_backward('a', features(), options=RECORDED)
    experts = recorded.outputs['routed_experts']
    assert [(own.dtype, own.shape) for own in experts] == [(np.uint8, (20, *SHAPE)), (np.uint8, (7, *SHAPE))]
    replayed = engine.forward_backward('b', features(routed_experts=experts), options=RECORDED)
    assert replayed.loss == recorded.loss
    for name in ('logps', 'outputs'):
        own, other = (getattr(result, name) for result in (recorded, replayed))
        pairs = zip(own, other, strict=True) if name == 'logps' else zip(experts, other['routed_experts'], strict=True)
        assert all(np.array_equal(*pair) for pair in pairs)
    states = [engine.adapter(name).weights.parameters() for name in 'ab']
    for name in 'ab':
        engine.clip_grad_and_step(name)
    assert all(map(torch.equal, *states))


def test_replayed_experts_stay_when_the_routers_change(engine):
    """A replayed pass uses the recorded experts with the changed routers' weights, and does not affect other passes."""
    before = engine.forward_only('a', features(), options=RECORDED)
    experts = before.outputs['routed_experts']
    perturb(engine)
    free = engine.forward_only('a', features(), options=RECORDED)
    assert not np.array_equal(free.outputs['routed_experts'][0], experts[0])
    items = [
        BatchItem(adapter_id='a', features=features(), options=RECORDED, is_training=False),
        BatchItem(adapter_id='b', features=features(routed_experts=experts), options=RECORDED, is_training=False),
    ]
    beside, replayed = engine.run_batch(items)
    assert all(map(np.array_equal, replayed.outputs['routed_experts'], experts))
    assert beside.loss == free.loss
    assert all(map(np.array_equal, beside.outputs['routed_experts'], free.outputs['routed_experts']))
    assert replayed.loss != before.loss, 'the weights of the experts do not come from the changed routers'
    assert replayed.loss != free.loss


def test_experts_of_the_first_tokens_only(engine):
    """If fewer rows of experts than tokens are given, the routers choose the experts of the last tokens."""
    recorded = engine.forward_only('a', features(), options=RECORDED)
    experts = recorded.outputs['routed_experts']
    perturb(engine)
    free = engine.forward_only('a', features(), options=RECORDED).outputs['routed_experts']
    partial = [own[:5] for own in experts]
    replayed = engine.forward_only('a', features(routed_experts=partial), options=RECORDED).outputs['routed_experts']
    for own, given, chosen in zip(replayed, experts, free, strict=True):
        assert np.array_equal(own[:5], given[:5])
        assert np.array_equal(own[5:, 0], chosen[5:, 0]), 'the first layer depends on the experts of other layers'
        assert not np.array_equal(own, given)


def test_activations_are_recomputed_with_the_replayed_experts(folder):
    """Training with replayed experts gives bitwise the same weights with and without gradient checkpointing."""
    weights = []
    rng = np.random.default_rng(7)
    experts = [np.stack([rng.permuted(np.arange(8))[:2] for _ in range(n * 2)]).reshape(n, *SHAPE) for n in (20, 7)]
    for is_checkpointed in (False, True):
        engine = TrainerEngine(PackedCausalLM.load(folder, is_checkpointed=is_checkpointed))
        engine.create_adapter('a', LORA)
        for _ in range(2):
            engine.forward_backward('a', features(routed_experts=experts))
            engine.clip_grad_and_step('a')
        weights.append(engine.adapter('a').weights.parameters())
    assert all(map(torch.equal, *weights))


@pytest.mark.parametrize(
    ('change', 'problem'),
    [
        (lambda own: np.concatenate([own, own[:1]]), r'must have shape \[20, 2, 2\]'),
        (lambda own: own[:0], 'must have shape'),
        (lambda own: own[:, :1], 'must have shape'),
        (lambda own: np.where(own == own[0, 0, 0], 8, own), 'contains 8; experts are 0 to 7'),
        (lambda own: own - 9, 'experts are 0 to 7'),
        (np.zeros_like, 'twice'),
        (lambda own: own.astype(np.float32), 'must contain integers'),
    ],
)
def test_wrong_experts_are_refused_by_name(engine, change, problem):
    """The error for experts of a wrong shape, type or range names the field."""
    experts = [
        own.astype(np.int64) for own in engine.forward_only('a', features(), options=RECORDED).outputs['routed_experts']
    ]
    with pytest.raises(InvalidFeatures, match=rf'features\[0\].routed_experts.*{problem}'):
        engine.forward_backward('a', features(routed_experts=[change(experts[0]), experts[1]]))


def test_other_models_refuse_experts(tiny_llama_dir, engine):
    """Models without experts refuse the field, and experts cannot be returned if tokens are masked."""
    dense = TrainerEngine(PackedCausalLM.load(tiny_llama_dir))
    dense.create_adapter('a', LoraConfig(r=2, seed=1))
    with pytest.raises(InvalidArgument, match='routed_experts'):
        dense.forward_only('a', features(), options=RECORDED)
    experts = engine.forward_only('a', features(), options=RECORDED).outputs['routed_experts']
    with pytest.raises(InvalidFeatures, match='routed_experts'):
        dense.forward_backward('a', features(routed_experts=experts))
    masks = [np.array([0] + [1] * 19), np.ones(7, np.int64)]
    with pytest.raises(InvalidArgument, match='masked tokens'):
        engine.forward_only('a', features(attention_mask=masks), options=RECORDED)
    engine.forward_backward('a', features(attention_mask=masks, routed_experts=experts))


def test_user_program_replays_experts(folder):
    """`return_routed_experts` returns the experts of each example, which the program can pass as a field."""
    model = TransformersModel(model_id=str(folder))
    model.add_adapter_to_model('default', LORA)
    sampled = model.forward_only(inputs=features(), return_routed_experts=True)
    assert [own.shape for own in sampled['routed_experts']] == [(20, *SHAPE), (7, *SHAPE)]
    trained = model.forward_backward(inputs=features(routed_experts=sampled['routed_experts']))
    assert trained['loss'] == sampled['loss']


@pytest.mark.parametrize('model_type', ['mixtral', 'qwen2_moe', 'olmoe', 'deepseek_v3'])
def test_models_with_softmax_routers_are_supported(model_type, tmp_path):
    """Models whose routers have softmax weights support recording and replay; other models do not."""
    build_tiny(model_type, tmp_path)
    model = PackedCausalLM.load(tmp_path)
    is_softmax = model_type != 'deepseek_v3'
    assert (model.routing is not None) is is_softmax


def test_a_pass_with_wrong_experts_is_refused():
    """Experts of another shape or out of range are refused before the pass."""
    shape = RoutingShape(2, 2, 300)
    assert shape.dtype == torch.int32
    for given in (torch.zeros(3, 1, 2), torch.full((3, 2, 2), 300), torch.full((3, 2, 2), -2)):
        with pytest.raises(PackError):
            ExpertRouting(shape, given)
