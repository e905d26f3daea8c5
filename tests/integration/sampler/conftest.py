"""Engines for tests of samplers. All tests with the fixture `vllm_engine` share one vLLM engine."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from fixtures.sampler_engines import Loan, make_torch_engine, make_vllm_engine
from fixtures.whole_models import whole_weights
from twinkle_services.sampler.ports import SamplerEngine

SEQUENCES = 32


@pytest_asyncio.fixture(loop_scope='session')
async def torch_engine(tiny_llama_dir: Path) -> AsyncIterator[SamplerEngine]:
    """The reference engine, which runs as many sequences at once as the vLLM engine."""
    engine = make_torch_engine(tiny_llama_dir, max_sequences=SEQUENCES, max_batch_tokens=512)
    yield engine
    await engine.close()


@pytest_asyncio.fixture(scope='session', loop_scope='session')
async def shared_vllm_engine(tiny_llama_dir: Path) -> AsyncIterator[SamplerEngine]:
    """Engine of vLLM that starts once for all tests."""
    engine = await make_vllm_engine(tiny_llama_dir, max_num_seqs=SEQUENCES)
    yield engine
    await engine.close()


@pytest_asyncio.fixture(loop_scope='session')
async def vllm_engine(shared_vllm_engine: SamplerEngine, tiny_llama_dir: Path) -> AsyncIterator[SamplerEngine]:
    """Shared vLLM engine without loaded versions."""
    loan = Loan(shared_vllm_engine, whole_weights(tiny_llama_dir, 0))
    yield loan
    await loan.give_back()


@pytest.fixture(params=['torch', 'vllm'])
def real_engine(request: pytest.FixtureRequest) -> SamplerEngine:
    """Each engine that runs a real model."""
    return request.getfixturevalue(f'{request.param}_engine')
