"""Fixtures every tier may use; what only one room needs lives beside its tests."""

from pathlib import Path

import pytest

from fixtures.tiny_model import build_tiny_model


@pytest.fixture(scope='session')
def tiny_llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny Llama with tied embeddings; read-only."""
    return build_tiny_model(tmp_path_factory.mktemp('tiny') / 'llama', family='llama')


@pytest.fixture(scope='session')
def tiny_qwen2_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny Qwen2 with biases in its projections; read-only."""
    return build_tiny_model(tmp_path_factory.mktemp('tiny') / 'qwen2', family='qwen2')


@pytest.fixture(scope='session')
def tiny_qwen3_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny Qwen3 with an untied head; read-only."""
    return build_tiny_model(tmp_path_factory.mktemp('tiny') / 'qwen3', family='qwen3')
