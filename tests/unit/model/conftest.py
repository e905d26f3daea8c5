"""What the trainer's tests share."""

from pathlib import Path

import numpy as np
import pytest

from twinkle.data_format import InputFeature, LoraConfig
from twinkle.model.engine import TrainerEngine
from twinkle.nn import PackedCausalLM

CONFIG = LoraConfig(r=4, lora_alpha=8, seed=3)


@pytest.fixture
def model(tiny_llama_dir: Path) -> PackedCausalLM:
    """A tiny Llama."""
    return PackedCausalLM.load(tiny_llama_dir)


@pytest.fixture
def engine(model: PackedCausalLM) -> TrainerEngine:
    """A trainer with one adapter, 'a'."""
    engine = TrainerEngine(model)
    engine.create_adapter('a', CONFIG)
    return engine


@pytest.fixture
def draw_feature():
    """Make features of random tokens whose first labels are masked."""

    def draw(length: int = 12, seed: int = 0, **fields: object) -> InputFeature:
        ids = np.random.default_rng(seed).integers(3, 300, length + 1)
        labels = ids[1:].copy()
        labels[: length // 3] = -100
        return InputFeature(input_ids=ids[:-1], labels=labels, **fields)

    return draw
