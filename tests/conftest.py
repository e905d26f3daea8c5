"""Fixtures for every tier. Fixtures of a single package are in the test folder of the package."""

import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from fixtures.postgres import empty_database, postgres_url
from fixtures.tiny_model import build_tiny_model

# Durations depend on other work of the machine, so a long duration never makes a test fail.
hypothesis.settings.register_profile(
    'without times', deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile('without times')

# The library `datasets` reads these variables when it is imported.
_DATASETS_CACHE = tempfile.TemporaryDirectory(prefix='twinkle-datasets-')
os.environ.update(HF_DATASETS_CACHE=_DATASETS_CACHE.name, HF_DATASETS_DISABLE_PROGRESS_BARS='1')


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


@pytest.fixture(scope='session')
def postgres() -> Iterator[str]:
    """URL of a PostgreSQL database for tests. Without a server, tests fail in CI and are skipped elsewhere."""
    if url := os.environ.get('TWINKLE_TEST_POSTGRES_URL'):
        yield url
        return
    with postgres_url() as found:
        if found is None:
            fail_or_skip = pytest.fail if os.environ.get('CI') else pytest.skip
            fail_or_skip(
                'PostgreSQL is not available: install a server (apt-get install postgresql), '
                'or set TWINKLE_TEST_POSTGRES_URL to a database that the tests may empty'
            )
        yield found


@pytest.fixture
def postgres_database(postgres: str) -> str:
    """URL of a PostgreSQL database without tables."""
    empty_database(postgres)
    return postgres


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the console's tests."""
    parser.addoption('--console-pictures', type=Path, help='existing folder for pictures of the pages of the console')
    parser.addoption('--console-model', help='base model of the pictures; default: a tiny one with random weights')


_STARTING_VLLM = ('contract/sampler', 'integration/sampler')
_START_SECONDS = 300
"""Timeout that includes the start of vLLM, which takes minutes on a busy machine."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    """Pause garbage collection while test modules are imported."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Exclude imported modules and collected tests from later garbage collections, which would traverse all of them."""
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Raise the timeout of tests in folders that start vLLM, because any of these tests may run first."""
    folders = tuple(Path(__file__).parent / folder for folder in _STARTING_VLLM)
    for item in items:
        is_starting = any(item.path.is_relative_to(folder) for folder in folders)
        if is_starting and item.get_closest_marker('timeout') is None:
            item.add_marker(pytest.mark.timeout(_START_SECONDS))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the values that tests recorded as properties."""
    for report in terminalreporter.getreports('passed'):
        if report.when == 'call' and report.user_properties:
            measured = ', '.join(f'{name} {value}' for name, value in report.user_properties)
            terminalreporter.write_line(f'MEASURED {report.nodeid}: {measured}')
