"""Tests of full-parameter training and of restoring the base model afterwards."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from fixtures.peft_oracle import label_logprobs
from fixtures.tiny_model import build_tiny_model
from twinkle.nn import AdapterSpan, FullWeights, PackedCausalLM, SequenceSpan, UnknownParameters, UnsupportedModel

IDS = list(range(3, 26))
LABELS = [*IDS[1:], -100]


@pytest.fixture(params=['llama', 'qwen2', 'qwen3'])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Folder of a model of each family: tied and untied embeddings, biases, query norms."""
    return build_tiny_model(tmp_path / request.param, family=request.param)


def test_gradients_are_those_of_plain_transformers(folder: Path) -> None:
    """Every parameter, including the tied head and the norms, gets the gradient that transformers computes."""
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation='eager')
    label_logprobs(plain, IDS, LABELS).sum().backward()
    model = PackedCausalLM.load(folder)
    weights = FullWeights(model)
    _logprob_sum(model, weights).backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    assert weights.named_parameters().keys() == expected.keys()
    for name, parameter in weights.named_parameters().items():
        torch.testing.assert_close(parameter.grad, expected[name], atol=2e-5, rtol=2e-4, msg=name)


def test_biases_of_frozen_weights_have_gradients(tmp_path: Path) -> None:
    """Biases get the gradients that transformers computes if the weights of their layers are frozen."""
    folder = build_tiny_model(tmp_path, family='qwen2')
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation='eager')
    label_logprobs(plain, IDS, LABELS).sum().backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters() if name.endswith('.bias')}
    model = PackedCausalLM.load(folder)
    weights = FullWeights(model, ['bias'])
    _logprob_sum(model, weights).backward()
    assert expected
    assert weights.named_parameters().keys() == expected.keys()
    for name, parameter in weights.named_parameters().items():
        torch.testing.assert_close(parameter.grad, expected[name], atol=2e-5, rtol=2e-4, msg=name)


def test_release_restores_the_base_model_bitwise(folder: Path) -> None:
    """A released model gives results bitwise equal to those before training, and collects no gradients."""
    model = PackedCausalLM.load(folder)
    before = _logprob_sum(model, None)
    weights = FullWeights(model)
    optimizer = torch.optim.SGD(weights.parameters(), lr=0.1)
    _logprob_sum(model, weights).backward()
    optimizer.step()
    assert not torch.equal(_logprob_sum(model, weights), before)
    weights.release()
    after = _logprob_sum(model, None)
    assert torch.equal(after, before)
    assert not after.requires_grad


def test_only_selected_parameters_are_trained(tmp_path: Path) -> None:
    """Names select parameters by the parts of their paths; all other parameters stay frozen."""
    model = PackedCausalLM.load(build_tiny_model(tmp_path))
    weights = FullWeights(model, ['mlp.down_proj', 'norm'])
    assert all('down_proj' in name or name == 'model.norm.weight' for name in weights.named_parameters())
    assert sum(parameter.requires_grad for parameter in model.base_parameters.values()) == len(weights.parameters())


def test_state_loads_and_mismatched_state_is_refused(tmp_path: Path) -> None:
    """A state of the same parameters is loaded; a state that does not match is refused and changes nothing."""
    model = PackedCausalLM.load(build_tiny_model(tmp_path))
    weights = FullWeights(model)
    state = {name: tensor + 1.0 for name, tensor in weights.peft_state().items()}
    weights.load_peft_state(state)
    assert all(torch.equal(tensor, state[name]) for name, tensor in weights.peft_state().items())
    invalid = {**state, 'model.norm.weight': torch.zeros(3)}
    with pytest.raises(ValueError, match='shape'):
        weights.load_peft_state(invalid)
    with pytest.raises(ValueError, match='match the model'):
        weights.load_peft_state({})
    assert all(torch.equal(tensor, state[name]) for name, tensor in weights.peft_state().items())


def test_unknown_names_and_other_dtypes_are_refused(tmp_path: Path) -> None:
    """The error for an unknown name lists the known names; 16-bit weights are refused."""
    folder = build_tiny_model(tmp_path)
    with pytest.raises(UnknownParameters, match='down_proj'):
        FullWeights(PackedCausalLM.load(folder), ['no_such_layer'])
    with pytest.raises(UnsupportedModel, match='float32'):
        FullWeights(PackedCausalLM.load(folder, dtype='bfloat16'))


def _logprob_sum(model: PackedCausalLM, weights: FullWeights | None) -> torch.Tensor:
    ids = torch.tensor(IDS)
    hidden = model.hidden(
        ids,
        torch.arange(len(IDS)),
        sequences=[SequenceSpan(0, len(IDS))],
        adapters=[AdapterSpan(0, len(IDS), weights)],
    )
    return model.head_outputs(hidden[:-1], ids[1:]).logps_R.sum()
