"""Fixtures for the engines of the contract tests. The vLLM engine starts once, and all tests share it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from fixtures.fake_sampler_engine import FakeSamplerEngine
from fixtures.sampled import ONE, TWO, lora_weights
from fixtures.sampler_engines import Loan, make_torch_engine, make_vllm_engine
from fixtures.whole_models import whole_weights
from twinkle_services.sampler.ports import SamplerEngine


@pytest_asyncio.fixture(loop_scope='session')
async def fake_engine() -> AsyncIterator[SamplerEngine]:
    """The fake engine that other tests use, with two versions loaded."""
    engine = FakeSamplerEngine()
    await _load_two(engine)
    yield engine
    await engine.close()


@pytest_asyncio.fixture(loop_scope='session')
async def torch_engine(tiny_llama_dir: Path) -> AsyncIterator[SamplerEngine]:
    """The torch engine, which is the reference, with two versions loaded."""
    engine = make_torch_engine(tiny_llama_dir)
    await _load_two(engine)
    yield engine
    await engine.close()


@pytest_asyncio.fixture(scope='session', loop_scope='session')
async def shared_vllm_engine(tiny_llama_dir: Path) -> AsyncIterator[SamplerEngine]:
    """One vLLM engine for all tests, because starting it takes longer than the tests."""
    engine = await make_vllm_engine(tiny_llama_dir)
    yield engine
    await engine.close()


@pytest_asyncio.fixture(loop_scope='session')
async def vllm_engine(shared_vllm_engine: SamplerEngine, tiny_llama_dir: Path) -> AsyncIterator[SamplerEngine]:
    """The vLLM engine, with two versions loaded."""
    loan = Loan(shared_vllm_engine, whole_weights(tiny_llama_dir, 0))
    await _load_two(loan)
    yield loan
    await loan.give_back()


@pytest.fixture(params=['fake', 'torch', 'vllm'])
def engine(request: pytest.FixtureRequest) -> SamplerEngine:
    """Each engine; the test runs once per engine."""
    return request.getfixturevalue(f'{request.param}_engine')


@pytest.fixture(params=['torch', 'vllm'])
def real_engine(request: pytest.FixtureRequest) -> SamplerEngine:
    """Each engine that runs a model; the test runs once per engine."""
    return request.getfixturevalue(f'{request.param}_engine')


async def _load_two(engine: SamplerEngine) -> None:
    for key in (ONE, TWO):
        await engine.load_adapter(key, lora_weights(key.version))
