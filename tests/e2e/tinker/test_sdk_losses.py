"""Compares every loss of the real SDK with its formula, which is computed from the returned log-probabilities."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tinker
import torch

from fixtures.tinker_sdk import ADAM, SDK_MARKS, datum, logprobs_of, new_model, scores, tokens_of, train, weighted
from twinkle.data_format import LoraConfig
from twinkle.model import TransformersModel
from twinkle_client.stack import StackState

pytestmark = SDK_MARKS

LENGTH = 9
EXAMPLES = [tokens_of(seed, LENGTH + 1) for seed in range(4)]
FLOAT = np.ndarray[Any, Any]
Formula = Callable[[FLOAT, FLOAT, FLOAT, FLOAT], FLOAT]
"""Function of log-probabilities, sampler log-probabilities, advantages and mask, each [tokens]; returns losses
[tokens]."""


def _ppo(low: float, high: float) -> Formula:
    def losses(lp: FLOAT, q: FLOAT, a: FLOAT, _: FLOAT) -> FLOAT:
        r = np.exp(lp - q)
        return -np.minimum(r * a, np.clip(r, low, high) * a)

    return losses


def _gspo(low: float, high: float) -> Formula:
    def losses(lp: FLOAT, q: FLOAT, a: FLOAT, mask: FLOAT) -> FLOAT:
        r = np.exp(np.mean((lp - q)[mask != 0]))
        return np.full_like(lp, 1.0) * -np.minimum(r * a, np.clip(r, low, high) * a)

    return losses


def _cispo(low: float, high: float) -> Formula:
    return lambda lp, q, a, _: -np.clip(np.exp(lp - q), low, high) * lp * a


LOSSES: list[tuple[str, dict[str, float], Formula]] = [
    ('importance_sampling', {}, lambda lp, q, a, _: -np.exp(lp - q) * a),
    ('ppo', {}, _ppo(0.8, 1.2)),
    ('ppo', {'clip_low_threshold': 0.5, 'clip_high_threshold': 1.1}, _ppo(0.5, 1.1)),
    ('cispo', {}, _cispo(0.0, 4.0)),
    ('cispo', {'clip_low_threshold': 0.9, 'clip_high_threshold': 1.1}, _cispo(0.9, 1.1)),
    ('dro', {'beta': 0.3}, lambda lp, q, a, _: -(lp * a - 0.15 * (lp - q) ** 2)),
    # tinker-cookbook's rl_loop sends no thresholds.
    ('gspo', {}, _gspo(0.9997, 1.0004)),
    ('gspo', {'clip_low_threshold': 0.9, 'clip_high_threshold': 1.1}, _gspo(0.9, 1.1)),
]


@pytest.fixture(scope='module')
def model(service: tinker.ServiceClient, stack: StackState) -> tinker.TrainingClient:
    """A model whose weights differ from the initial weights."""
    model = new_model(service, stack)
    train(model, *EXAMPLES, steps=2)
    return model


@pytest.mark.parametrize(('name', 'config', 'formula'), LOSSES, ids=[f'{name}-{config}' for name, config, _ in LOSSES])
def test_policy_loss_has_its_closed_form(
    model: tinker.TrainingClient, name: str, config: dict[str, float], formula: Formula
) -> None:
    """`loss:sum` is the sum of the formula over all tokens, for sampler policies near the model and far from it.

    A forward pass returns the same sum as `forward_backward`.
    """
    data, streams = _policy_data(model, with_mask=name == 'gspo')
    output = model.forward_backward(data, name, config).result()
    expected = sum(
        formula(lp.astype(np.float64), *given).sum() for lp, given in zip(logprobs_of(output), streams, strict=True)
    )
    assert output.metrics['loss:sum'] == pytest.approx(expected, rel=1e-4)
    assert model.forward(data, name, config).result().metrics['loss:sum'] == output.metrics['loss:sum']
    model.optim_step(tinker.AdamParams(learning_rate=0.0)).result()


@pytest.mark.parametrize(('name', 'config'), [(name, config) for name, config, _ in LOSSES[:6]], ids=str)
def test_policy_loss_makes_tokens_with_an_advantage_more_likely(
    service: tinker.ServiceClient, stack: StackState, name: str, config: dict[str, float]
) -> None:
    """Steps make tokens with a positive advantage more likely, and tokens with a negative advantage less likely."""
    model = new_model(service, stack)
    good, bad = EXAMPLES[:2]
    before = scores(model, good, bad)
    q = np.split(before, 2)
    data = [
        datum(tokens, logprobs=given.tolist(), advantages=[sign] * LENGTH)
        for tokens, given, sign in zip((good, bad), q, (1.0, -1.0), strict=True)
    ]
    for _ in range(3):
        backward, step = model.forward_backward(data, name, config), model.optim_step(ADAM)
        backward.result(), step.result()
    change = np.split(scores(model, good, bad) - before, 2)
    assert change[0].mean() > 0 > change[1].mean()


def test_thresholds_may_be_given_for_each_position(model: tinker.TrainingClient) -> None:
    """Thresholds for each position replace the thresholds in the options."""
    data, streams = _policy_data(model, bounds=(0.7, 1.05))
    output = model.forward(data, 'ppo').result()
    expected = sum(_ppo(0.7, 1.05)(lp, *given).sum() for lp, given in zip(logprobs_of(output), streams, strict=True))
    assert output.metrics['loss:sum'] == pytest.approx(expected, rel=1e-4)


def test_several_targets_for_a_position(model: tinker.TrainingClient) -> None:
    """Dense or sparse targets [positions, targets] get scores of this shape; the loss is their negated weighted sum."""
    tokens = EXAMPLES[0]
    targets = np.stack([tokens[1:], np.roll(tokens[1:], 1), np.roll(tokens[1:], 2)], axis=1)
    weights = np.random.default_rng(0).random(targets.shape).astype(np.float32)
    weights[::2, 1] = 0.0
    prompt = tinker.ModelInput.from_ints(tokens[:-1])
    dense = {'target_tokens': torch.tensor(targets), 'weights': torch.tensor(weights)}
    given = {name: tinker.TensorData.from_torch(tensor) for name, tensor in dense.items()}
    sparse = {name: tinker.TensorData.from_torch_sparse(tensor) for name, tensor in dense.items()}
    outputs = [
        model.forward([tinker.Datum(model_input=prompt, loss_fn_inputs=inputs)], 'cross_entropy').result()
        for inputs in (given, sparse)
    ]
    first, second = (logprobs_of(output)[0] for output in outputs)
    assert first.shape == targets.shape
    np.testing.assert_allclose(first[:, 0], scores(model, tokens), atol=1e-5)
    np.testing.assert_array_equal(first, second)
    for output in outputs:
        assert output.metrics['loss:sum'] == pytest.approx(-(first * weights).sum(), rel=1e-4)


def test_several_targets_for_a_position_are_learned(service: tinker.ServiceClient, stack: StackState) -> None:
    """Training on two weighted candidates for each position lowers the loss."""
    model = new_model(service, stack)
    tokens = EXAMPLES[0]
    targets = np.stack([tokens[1:], np.roll(tokens[1:], 1)], axis=1)
    inputs = {'target_tokens': targets.tolist(), 'weights': np.full(targets.shape, 0.5).tolist()}
    data = [tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)]
    losses: list[float] = []
    for _ in range(4):
        backward, step = model.forward_backward(data, 'cross_entropy'), model.optim_step(ADAM)
        losses.append(backward.result().metrics['loss:sum'])
        step.result()
    assert losses[-1] < losses[0]


def test_custom_loss_trains_like_the_built_in_one(service: tinker.ServiceClient, stack: StackState) -> None:
    """A custom cross-entropy gives bitwise the same weights as the built-in loss, and its metrics are returned."""
    plain, custom = new_model(service, stack), new_model(service, stack)
    data = [weighted(tokens) for tokens in EXAMPLES]

    def negative_sum(_: Sequence[tinker.Datum], logprobs: Sequence[torch.Tensor]) -> tuple[Any, dict[str, float]]:
        return -torch.cat([*logprobs]).sum(), {'seen:sum': float(len(logprobs))}

    expected = plain.forward_backward(data, 'cross_entropy').result().metrics['loss:sum']
    metrics = custom.forward_backward_custom(data, negative_sum).result().metrics
    assert metrics['loss:sum'] == pytest.approx(expected, rel=1e-6)
    assert metrics['seen:sum'] == len(EXAMPLES)
    for model in (plain, custom):
        model.optim_step(ADAM).result()
    np.testing.assert_array_equal(scores(plain, *EXAMPLES), scores(custom, *EXAMPLES))


def test_custom_loss_of_any_form_is_learned(service: tinker.ServiceClient, stack: StackState) -> None:
    """Training with a custom loss, the squared distance to a log-probability, lowers this loss."""
    model = new_model(service, stack)
    data = [weighted(tokens) for tokens in EXAMPLES]

    def distance(_: Sequence[tinker.Datum], logprobs: Sequence[torch.Tensor]) -> tuple[Any, dict[str, float]]:
        return (torch.cat([*logprobs]) + 1.0).square().sum(), {}

    losses: list[float] = []
    for _ in range(5):
        backward, step = model.forward_backward_custom(data, distance), model.optim_step(ADAM)
        losses.append(backward.result().metrics['loss:sum'])
        step.result()
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize(
    'options',
    [
        {'learning_rate': 1e-3},
        {'learning_rate': 1e-2, 'beta1': 0.5, 'beta2': 0.7, 'eps': 1e-3, 'weight_decay': 0.1},
        {'learning_rate': 1e-2, 'grad_clip_norm': 0.01},
    ],
    ids=['defaults', 'all options', 'clipped'],
)
def test_step_equals_adamw_of_torch(
    service: tinker.ServiceClient, stack: StackState, options: dict[str, float]
) -> None:
    """Steps of the SDK nearly equal those of the library's model with torch's AdamW and the same options."""
    model = new_model(service, stack, rank=4, seed=11, train_unembed=False)
    params = tinker.AdamParams(**options)
    data = [weighted(tokens) for tokens in EXAMPLES]
    for _ in range(3):
        model.forward_backward(data, 'cross_entropy').result()
        model.optim_step(params).result()
    own = TransformersModel(stack.base_model, device='cpu')
    own.add_adapter_to_model('own', LoraConfig(r=4, lora_alpha=32, seed=11))
    own.set_loss('cross_entropy', adapter_name='own')
    own.set_optimizer(
        'AdamW',
        adapter_name='own',
        lr=params.learning_rate,
        betas=(params.beta1, params.beta2),
        eps=params.eps,
        weight_decay=params.weight_decay,
    )
    features = [{'input_ids': tokens[:-1], 'labels': tokens[1:]} for tokens in EXAMPLES]
    for _ in range(3):
        own.forward_backward(features, adapter_name='own')
        own.clip_grad_and_step(params.grad_clip_norm or float('inf'), adapter_name='own')
    expected = np.concatenate(own.forward_only(features, adapter_name='own')['logps'])
    np.testing.assert_allclose(scores(model, *EXAMPLES), expected, atol=2e-4)


def _policy_data(
    model: tinker.TrainingClient, *, with_mask: bool = False, bounds: tuple[float, float] | None = None
) -> tuple[list[tinker.Datum], list[tuple[FLOAT, FLOAT, FLOAT]]]:
    """Return examples whose sampler policy is equal to, near and far from the model, and their streams."""
    random = np.random.default_rng(1)
    own = np.split(scores(model, *EXAMPLES), len(EXAMPLES))
    data: list[tinker.Datum] = []
    streams: list[tuple[FLOAT, FLOAT, FLOAT]] = []
    for index, (tokens, lp) in enumerate(zip(EXAMPLES, own, strict=True)):
        q = (lp + random.normal(0, 0.2 * index, LENGTH)).astype(np.float32)
        advantages = random.normal(0, 1, LENGTH).astype(np.float32)
        mask = np.array([0.0, 0.0, *[1.0] * (LENGTH - 2)], dtype=np.float32)
        advantages[mask == 0] = 0.0
        inputs = {'logprobs': q.tolist(), 'advantages': advantages.tolist()}
        if with_mask:
            inputs['sequence_ratio_mask'] = mask.tolist()
        if bounds:
            inputs['clip_low_threshold'], inputs['clip_high_threshold'] = ([bound] * LENGTH for bound in bounds)
        data.append(datum(tokens, **inputs))
        streams.append((q.astype(np.float64), advantages.astype(np.float64), mask))
    return data, streams
