"""Tests of models that are divided among ranks before their weights are read."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from twinkle.nn import UnsupportedModel
from twinkle.nn.media import load_pretrained

HEAD, EMBEDDING = 'lm_head.weight', 'model.embed_tokens.weight'


def test_a_model_is_divided_before_its_weights_are_read(tiny_llama_dir: Path) -> None:
    """`divide` gets a model on the meta device with tied weights as one parameter; weights are loaded afterwards."""
    seen: list[tuple[str, bool]] = []

    def divide(model: PreTrainedModel) -> None:
        head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
        seen.append((embedding.device.type, head is embedding))

    model = load_pretrained(tiny_llama_dir, dtype=torch.float32, divide=divide)
    plain = load_pretrained(tiny_llama_dir, dtype=torch.float32)
    assert seen == [('meta', True)]
    assert type(model) is type(plain)
    expected = dict(plain.named_parameters())
    assert expected.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(parameter, expected[name]) for name, parameter in model.named_parameters())


def test_different_values_of_tied_weights_are_refused(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """A folder that stores both tied weights is accepted if they are equal; otherwise, the error names them."""
    folder = tmp_path / 'model'
    shutil.copytree(tiny_llama_dir, folder)
    weights = load_file(folder / 'model.safetensors')
    save_file({**weights, HEAD: weights[EMBEDDING].clone()}, folder / 'model.safetensors', {'format': 'pt'})
    load_pretrained(folder, dtype=torch.float32, divide=lambda _: None)
    save_file({**weights, HEAD: weights[EMBEDDING] + 1}, folder / 'model.safetensors', {'format': 'pt'})
    with pytest.raises(UnsupportedModel, match='set tie_word_embeddings to false'):
        load_pretrained(folder, dtype=torch.float32, divide=lambda _: None)
