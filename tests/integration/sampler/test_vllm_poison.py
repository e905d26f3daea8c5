"""One tenant's weights and forms that ruin what they touch: everybody else's answers stay what they were."""

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

pytestmark = [pytest.mark.asyncio(loop_scope='session'), pytest.mark.timeout(300)]

SLOW_FORM = StructuredOutput(regex='(a{1,100}){1,100}')
"""Every token of it costs more than the one before; two hundred of them took minutes."""
GREEDY = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)


@pytest_asyncio.fixture(scope='module', loop_scope='session')
async def engine(tiny_llama_dir: Path):
    """One with so little memory for keys and values that every request uses what others had."""
    need_vllm()
    from twinkle.sampler.vllm import VllmEngine  # noqa: PLC0415 - heavy

    arguments = {**VLLM_ARGUMENTS, 'kv_cache_memory_bytes': 1 << 20}
    engine = await asyncio.to_thread(VllmEngine, str(tiny_llama_dir), arguments)
    yield engine
    await engine.close()


async def tokens_of(engine, name: str, params: SamplingParams, adapter=None, *, prompt=(1, 40, 41)) -> list[list[int]]:
    """Return the tokens of each sequence."""
    from twinkle.sampler.vllm import VllmRequest  # noqa: PLC0415 - heavy

    request = VllmRequest(request_id=name, prompt_token_ids=prompt, params=params, adapter=adapter, cache_salt=name)
    tokens: list[list[int]] = [[] for _ in range(params.num_samples)]
    async with aclosing(engine.generate(request)) as events:
        async for event in events:
            if hasattr(event, 'tokens'):
                tokens[event.sequence_index] += event.tokens
    return tokens


async def test_weights_that_are_not_finite_stay_with_their_adapter(engine):
    """Memory that held keys and values which are not numbers is as good as new to the next who gets it."""
    from twinkle.sampler.vllm import AdapterSource  # noqa: PLC0415 - heavy

    expected = await tokens_of(engine, 'before', GREEDY)
    bad = {
        name: TensorData.from_numpy(np.full(tensor.shape, np.nan, np.float32))
        for name, tensor in lora_tensors(1).items()
    }
    adapter = await engine.add_adapter('bad', 1, AdapterSource(config=LORA, tensors=bad))
    long = replace(GREEDY, max_tokens=300, num_samples=8)
    for turn in range(2):
        await tokens_of(engine, f'bad {turn}', long, adapter)
    for turn in range(4):
        assert await tokens_of(engine, f'after {turn}', GREEDY) == expected


async def test_form_that_costs_too_much_ends_its_own_sequence(engine):
    """It is refused by its name, in the middle if need be, and the engine goes on."""
    params = SamplingParams(max_tokens=400, min_tokens=390, seed=1, structured_output=SLOW_FORM)
    with pytest.raises(InvalidSamplingParams) as caught:
        await tokens_of(engine, 'slow', params)
    assert caught.value.field == 'structured_output'
    assert len((await tokens_of(engine, 'next', GREEDY))[0]) == GREEDY.max_tokens


async def test_form_that_nothing_has_is_refused(engine):
    """A rule that leads nowhere is the caller's mistake, not the end of an engine."""
    params = SamplingParams(max_tokens=4, structured_output=StructuredOutput(grammar='root ::= root'))
    with pytest.raises(InvalidSamplingParams):
        await tokens_of(engine, 'nowhere', params)


async def test_continued_form_goes_on_where_it_was(engine):
    """What another engine drew counts: the whole text has the form, not what is new of it."""
    from twinkle.sampler.engine import SequenceSoFar  # noqa: PLC0415 - heavy
    from twinkle.sampler.vllm import VllmRequest  # noqa: PLC0415 - heavy

    params = SamplingParams(max_tokens=40, seed=1, structured_output=StructuredOutput(regex='[ab]{6}'))
    [whole] = await tokens_of(engine, 'whole', params)
    begun = tuple(whole[:4])
    request = VllmRequest(
        request_id='rest',
        prompt_token_ids=(1, 40, 41),
        params=params,
        continued=(SequenceSoFar(token_ids=begun, is_finished=False),),
    )
    drawn: list[int] = []
    async with aclosing(engine.generate(request)) as events:
        async for event in events:
            drawn += event.tokens
    assert len(begun) + len(drawn) == len(whole)


async def test_forms_that_cost_too_much_to_compile_are_refused_before_the_engine_sees_them(engine):
    """A stream that began before goes on meanwhile, and a usual form is followed afterwards."""
    from twinkle.sampler.vllm import VllmRequest  # noqa: PLC0415 - heavy

    drawn: list[int] = []

    async def read() -> None:
        request = VllmRequest(request_id='reader', prompt_token_ids=(1, 40, 41), params=replace(GREEDY, max_tokens=500))
        async with aclosing(engine.generate(request)) as events:
            async for event in events:
                drawn.extend(getattr(event, 'tokens', ()))

    reading = asyncio.create_task(read())
    for form in COSTLY_FORMS:
        with pytest.raises(InvalidSamplingParams) as caught:
            await tokens_of(engine, 'costly', SamplingParams(max_tokens=4, num_samples=8, structured_output=form))
        assert caught.value.field == 'structured_output'
    await reading
    assert len(drawn) == 500
    [usual] = await tokens_of(engine, 'usual', SamplingParams(max_tokens=8, structured_output=USUAL_FORM))
    assert usual
