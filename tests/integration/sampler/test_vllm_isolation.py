"""Harmful weights and forms (structured outputs) of a tenant do not change the results of other tenants."""

import asyncio
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from fixtures.forms import COSTLY_FORMS, USUAL_FORM
from fixtures.sampled import LORA, lora_tensors
from fixtures.sampler_engines import VLLM_ARGUMENTS, need_vllm
from twinkle.data_format import SamplingParams, StructuredOutput, TensorData
from twinkle.sampler.errors import InvalidSamplingParams

pytestmark = [pytest.mark.asyncio(loop_scope='session'), pytest.mark.timeout(300), pytest.mark.slow]

SLOW_FORM = StructuredOutput(regex='(a{1,100}){1,100}')
"""A form whose cost grows with every token; two hundred tokens take minutes."""
GREEDY = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)


@pytest_asyncio.fixture(scope='module', loop_scope='session')
async def engine(tiny_llama_dir: Path):
    """An engine with so little key-value memory that requests reuse each other's blocks."""
    need_vllm()
    from twinkle.sampler.vllm import VllmEngine  # noqa: PLC0415 (slow import)

    arguments = {**VLLM_ARGUMENTS, 'kv_cache_memory_bytes': 1 << 20}
    engine = await asyncio.to_thread(VllmEngine, str(tiny_llama_dir), arguments)
    yield engine
    await engine.close()


async def tokens_of(engine, name: str, params: SamplingParams, adapter=None, *, prompt=(1, 40, 41)) -> list[list[int]]:
    """Return the tokens of each sequence."""
    from twinkle.sampler.vllm import VllmRequest  # noqa: PLC0415 (slow import)

    request = VllmRequest(request_id=name, prompt_token_ids=prompt, params=params, adapter=adapter, cache_salt=name)
    tokens: list[list[int]] = [[] for _ in range(params.num_samples)]
    async with aclosing(engine.generate(request)) as events:
        async for event in events:
            if hasattr(event, 'tokens'):
                tokens[event.sequence_index] += event.tokens
    return tokens


async def test_nan_weights_do_not_affect_other_requests(engine):
    """Key-value blocks that contained NaN do not affect the next request that uses them."""
    from twinkle.sampler.vllm import AdapterSource  # noqa: PLC0415 (slow import)

    expected = await tokens_of(engine, 'before', GREEDY)
    nan_tensors = {
        name: TensorData.from_numpy(np.full(tensor.shape, np.nan, np.float32))
        for name, tensor in lora_tensors(1).items()
    }
    adapter = await engine.add_adapter('nan_tensors', 1, AdapterSource(config=LORA, tensors=nan_tensors))
    long = replace(GREEDY, max_tokens=300, num_samples=8)
    for attempt in range(2):
        await tokens_of(engine, f'bad {attempt}', long, adapter)
    for attempt in range(4):
        assert await tokens_of(engine, f'after {attempt}', GREEDY) == expected


@pytest.mark.slow
async def test_expensive_form_fails_only_its_request(engine):
    """A form that becomes too expensive during sampling fails its request, and the engine continues."""
    params = SamplingParams(max_tokens=400, min_tokens=390, seed=1, structured_output=SLOW_FORM)
    with pytest.raises(InvalidSamplingParams) as caught:
        await tokens_of(engine, 'slow', params)
    assert caught.value.field == 'structured_output'
    assert len((await tokens_of(engine, 'next', GREEDY))[0]) == GREEDY.max_tokens


async def test_unsatisfiable_form_is_refused(engine):
    """A grammar that no text satisfies is refused as invalid."""
    params = SamplingParams(max_tokens=4, structured_output=StructuredOutput(grammar='root ::= root'))
    with pytest.raises(InvalidSamplingParams):
        await tokens_of(engine, 'nowhere', params)


async def test_continued_form_counts_the_earlier_tokens(engine):
    """A continuation counts the earlier tokens, so the complete sequence is as long as an uninterrupted sequence."""
    from twinkle.sampler.engine import SequenceSoFar  # noqa: PLC0415 (slow import)
    from twinkle.sampler.vllm import VllmRequest  # noqa: PLC0415 (slow import)

    params = SamplingParams(max_tokens=40, seed=1, structured_output=StructuredOutput(regex='[ab]{6}'))
    [complete] = await tokens_of(engine, 'whole', params)
    first_tokens = tuple(complete[:4])
    request = VllmRequest(
        request_id='rest',
        prompt_token_ids=(1, 40, 41),
        params=params,
        continued=(SequenceSoFar(token_ids=first_tokens, is_finished=False),),
    )
    sampled: list[int] = []
    async with aclosing(engine.generate(request)) as events:
        async for event in events:
            sampled += event.tokens
    assert len(first_tokens) + len(sampled) == len(complete)


@pytest.mark.slow
async def test_expensive_forms_are_refused_before_they_reach_the_engine(engine):
    """Expensive forms are refused while a running stream completes; afterwards, an ordinary form is accepted."""
    from twinkle.sampler.vllm import VllmRequest  # noqa: PLC0415 (slow import)

    sampled: list[int] = []

    async def read() -> None:
        request = VllmRequest(request_id='reader', prompt_token_ids=(1, 40, 41), params=replace(GREEDY, max_tokens=500))
        async with aclosing(engine.generate(request)) as events:
            async for event in events:
                sampled.extend(getattr(event, 'tokens', ()))

    reading = asyncio.create_task(read())
    for form in COSTLY_FORMS:
        with pytest.raises(InvalidSamplingParams) as caught:
            await tokens_of(engine, 'costly', SamplingParams(max_tokens=4, num_samples=8, structured_output=form))
        assert caught.value.field == 'structured_output'
    await reading
    assert len(sampled) == 500
    [usual] = await tokens_of(engine, 'usual', SamplingParams(max_tokens=8, structured_output=USUAL_FORM))
    assert usual
