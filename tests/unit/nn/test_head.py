"""Compares the blockwise head with torch's log_softmax over all logits."""

import pytest
import torch
from torch import Tensor

from twinkle.nn.head import HeadOutputs, run_head
from twinkle.nn.head_weights import HeadWeights

ROWS, HIDDEN, VOCAB = 150, 24, 97


def random_tensor(*shape: int, seed: int) -> Tensor:
    """Return random normal values."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def head_of(*, is_capped: bool = False, has_bias: bool = False) -> HeadWeights:
    """Return random head weights, with a soft cap and a bias on request."""
    bias = random_tensor(VOCAB, seed=2) if has_bias else None
    return HeadWeights(random_tensor(VOCAB, HIDDEN, seed=1), bias, softcap=3.0 if is_capped else None)


def random_ids(*shape: int, seed: int = 3) -> Tensor:
    """Return token ids."""
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def expected_outputs(hidden: Tensor, labels: Tensor, head: HeadWeights, temperature, candidates: Tensor) -> HeadOutputs:
    """Compute all outputs from the full logits with autograd."""
    logits = hidden @ head.weight_VD.t()
    if head.bias_V is not None:
        logits = logits + head.bias_V
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    divisor = temperature[:, None] if isinstance(temperature, Tensor) else temperature
    logps = (logits / divisor).log_softmax(dim=-1)
    return HeadOutputs(
        logps.gather(1, labels[:, None])[:, 0], -(logps.exp() * logps).sum(dim=-1), logps.gather(1, candidates)
    )


def weighted(outputs: HeadOutputs, *, is_label_only: bool) -> Tensor:
    """Return a loss that weights every element of the requested outputs differently."""
    parts = [outputs.logps_R] if is_label_only else [outputs.logps_R, outputs.entropies_R, outputs.candidate_logps_RK]
    return sum((part * random_tensor(*part.shape, seed=7)).sum() for part in parts)


@pytest.mark.parametrize('temperature', [1.0, 0.7, torch.linspace(0.5, 2.0, ROWS)], ids=['one', 'scalar', 'by-row'])
@pytest.mark.parametrize('is_label_only', [True, False])
@pytest.mark.parametrize(('is_capped', 'has_bias'), [(False, False), (True, True)])
def test_values_and_gradients_equal_log_softmax(temperature, is_label_only, is_capped, has_bias):
    """Values and gradients equal torch's for any temperature, softcap and bias."""
    head = head_of(is_capped=is_capped, has_bias=has_bias)
    labels, candidates = random_ids(ROWS), random_ids(ROWS, 5, seed=4)
    requested = {} if is_label_only else {'is_entropy_needed': True, 'candidate_ids_RK': candidates}
    found = []
    for run in (
        lambda hidden: run_head(hidden, labels, head, temperature=temperature, **requested),
        lambda hidden: expected_outputs(hidden, labels, head, temperature, candidates),
    ):
        hidden = random_tensor(ROWS, HIDDEN, seed=5).requires_grad_()
        outputs = run(hidden)
        (gradient,) = torch.autograd.grad(weighted(outputs, is_label_only=is_label_only), hidden)
        found.append((gradient, outputs.logps_R))
    torch.testing.assert_close(found[0], found[1], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize('requested', ['entropies_R', 'candidate_logps_RK'])
def test_gradient_of_one_output_alone_equals_log_softmax(requested):
    """The gradient of only the entropies, or only the candidates, equals that of torch's log_softmax."""
    head, labels, candidates = head_of(), random_ids(ROWS), random_ids(ROWS, 4, seed=4)
    gradients = []
    for is_own in (True, False):
        hidden = random_tensor(ROWS, HIDDEN, seed=5).requires_grad_()
        outputs = (
            run_head(hidden, labels, head, is_entropy_needed=True, candidate_ids_RK=candidates)
            if is_own
            else expected_outputs(hidden, labels, head, 1.0, candidates)
        )
        gradients += torch.autograd.grad(getattr(outputs, requested).sum(), hidden)
    torch.testing.assert_close(gradients[0], gradients[1], atol=2e-5, rtol=1e-4)


def test_a_trained_head_gets_its_gradient():
    """A trained head gets the weight and bias gradients of torch's log_softmax."""
    gradients = []
    for is_own in (True, False):
        head = head_of(has_bias=True)
        leaves = [
            random_tensor(ROWS, HIDDEN, seed=5).requires_grad_(),
            head.weight_VD.requires_grad_(),
            head.bias_V.requires_grad_(),
        ]
        labels = random_ids(ROWS)
        outputs = (
            run_head(leaves[0], labels, head)
            if is_own
            else expected_outputs(leaves[0], labels, head, 1.0, random_ids(ROWS, 1))
        )
        gradients.append(torch.autograd.grad((outputs.logps_R * random_tensor(ROWS, seed=7)).sum(), leaves))
    torch.testing.assert_close(gradients[0], gradients[1], atol=2e-5, rtol=1e-4)


def test_entropies_and_candidates_are_computed_on_request():
    """Entropies and candidates are computed only on request."""
    outputs = run_head(random_tensor(3, HIDDEN, seed=5), random_ids(3), head_of())
    assert (outputs.entropies_R, outputs.candidate_logps_RK) == (None, None)


def test_rows_are_bitwise_independent():
    """A row has bitwise the same values and gradient alone, at the end of a block and in another block."""
    head, labels, candidates = head_of(is_capped=True), random_ids(ROWS), random_ids(ROWS, 3, seed=4)
    temperature = torch.linspace(0.5, 2.0, ROWS)
    hidden = random_tensor(ROWS, HIDDEN, seed=5)

    def run(rows: Tensor) -> list[Tensor]:
        leaf = hidden[rows].requires_grad_()
        own = {'temperature': temperature[rows], 'candidate_ids_RK': candidates[rows], 'is_entropy_needed': True}
        outputs = run_head(leaf, labels[rows], head, **own)
        parts = [outputs.logps_R, outputs.entropies_R, outputs.candidate_logps_RK]
        return [*parts, *torch.autograd.grad(sum(part.sum() for part in parts), leaf)]

    whole = run(torch.arange(ROWS))
    for chosen in (torch.tensor([140]), torch.arange(0, ROWS, 3), torch.arange(127, 131)):
        for part, own in zip(whole, run(chosen), strict=True):
            assert torch.equal(part[chosen], own)


def test_empty_batch_gives_empty_outputs():
    """A batch without labels gives empty outputs that support a backward pass."""
    hidden = random_tensor(0, HIDDEN, seed=5).requires_grad_()
    outputs = run_head(hidden, random_ids(0), head_of(), is_entropy_needed=True, candidate_ids_RK=random_ids(0, 2))
    assert (outputs.logps_R.shape, outputs.entropies_R.shape, outputs.candidate_logps_RK.shape) == ((0,), (0,), (0, 2))
    outputs.logps_R.sum().backward()
    assert hidden.grad.shape == (0, HIDDEN)


def test_improbable_labels_have_exact_logarithms():
    """The logarithm of a probability that underflows float32 is exact."""
    head = HeadWeights(torch.eye(4), None, softcap=None)
    outputs = run_head(torch.tensor([[200.0, 0.0, 0.0, 0.0]]), torch.tensor([1]), head)
    assert outputs.logps_R.item() == -200.0
