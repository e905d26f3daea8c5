"""Fixtures of the trainer's tests."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GemmaConfig, GemmaForCausalLM

from twinkle.data_format import InputFeature, LoraConfig
from twinkle.model.engine import TrainerEngine
from twinkle.nn import PackedCausalLM

CONFIG = LoraConfig(r=4, lora_alpha=8, seed=3)


@pytest.fixture(scope='session')
def tiny_gemma_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random Gemma: scaled embeddings, norms with an offset of one, tanh-approximated gelu gates."""
    folder = tmp_path_factory.mktemp('tiny') / 'gemma'
    torch.manual_seed(0)
    config = GemmaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=0.3,
    )
    GemmaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def model(tiny_llama_dir: Path) -> PackedCausalLM:
    """Tiny Llama model."""
    return PackedCausalLM.load(tiny_llama_dir)


@pytest.fixture
def engine(model: PackedCausalLM) -> TrainerEngine:
    """Trainer with one adapter, 'a'."""
    engine = TrainerEngine(model)
    engine.create_adapter('a', CONFIG)
    return engine


@pytest.fixture
def make_feature():
    """Factory of features with random tokens; the first third of the labels is masked with -100."""

    def draw(length: int = 12, seed: int = 0, **fields: object) -> InputFeature:
        ids = np.random.default_rng(seed).integers(3, 300, length + 1)
        labels = ids[1:].copy()
        labels[: length // 3] = -100
        return InputFeature(input_ids=ids[:-1], labels=labels, **fields)

    return draw
