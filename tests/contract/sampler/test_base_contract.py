"""Contract tests of replacing the base weights."""

from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest

from fixtures.engine_requests import make_request, run, score
from fixtures.sampled import ONE, Sampled, lora_weights
from fixtures.tiny_oracle import TinyOracle
from fixtures.whole_models import whole_weights
from twinkle_services.sampler.domain.errors import AdapterMisfit, EngineInUse

pytestmark = pytest.mark.asyncio(loop_scope='session')

TEXT = tuple(3 + (7 * index) % 250 for index in range(70))
"""A prompt longer than two blocks of the prefix cache."""
EMBEDDINGS = 'model.embed_tokens.weight'


async def complete(engine, name='it'):
    """Return tokens, log-probabilities and spans of a greedy completion by the base model."""
    sampled = await run(engine, make_request(name, prompt=TEXT, max_tokens=12, temperature=0, salt='same'))
    return sampled.tokens, [[entry[0] for entry in row] for row in sampled.logprobs], sampled.spans


async def test_replaced_base_is_used_with_its_version(engine, tiny_llama_dir: Path):
    """Tokens have the new base's version, equal weights give bitwise equal results, and caches are not used again."""
    await complete(engine)
    await engine.replace_base(whole_weights(tiny_llama_dir, 1, factor=1.25))
    first, first_logprobs, spans = await complete(engine)
    assert [(span.version, span.begin_token, span.end_token) for span in spans[0]] == [(1, 0, 12)]
    await engine.replace_base(whole_weights(tiny_llama_dir, 2, factor=0.75))
    _, other_logprobs, other_spans = await complete(engine)
    assert [span.version for span in other_spans[0]] == [2]
    assert other_logprobs != first_logprobs
    await engine.replace_base(whole_weights(tiny_llama_dir, 3, factor=1.25))
    again, again_logprobs, _ = await complete(engine)
    assert (again, again_logprobs) == (first, first_logprobs)


async def test_base_can_be_restored_bitwise(real_engine, tiny_llama_dir: Path):
    """New base weights give the results of transformers; restoring the old weights restores the results bitwise."""
    before = (await score(real_engine, None, TEXT)).tobytes()
    await real_engine.replace_base(whole_weights(tiny_llama_dir, 1, factor=1.25))
    np.testing.assert_allclose(
        await score(real_engine, None, TEXT), TinyOracle(tiny_llama_dir, factor=1.25).score(TEXT), rtol=0, atol=1e-4
    )
    await real_engine.replace_base(whole_weights(tiny_llama_dir, 2))
    assert (await score(real_engine, None, TEXT)).tobytes() == before


async def test_adapters_apply_to_a_replaced_base(real_engine, tiny_llama_dir: Path):
    """An adapter applies to the current base, and gives its old results once the old base is restored."""
    before = await score(real_engine, ONE, TEXT)
    await real_engine.replace_base(whole_weights(tiny_llama_dir, 1, factor=1.25))
    assert not np.array_equal(await score(real_engine, ONE, TEXT), before)
    await real_engine.replace_base(whole_weights(tiny_llama_dir, 2))
    np.testing.assert_allclose(await score(real_engine, ONE, TEXT), before, rtol=0, atol=1e-6)


@pytest.mark.parametrize('kind', ['adapter', 'incomplete'])
async def test_a_failed_replacement_keeps_the_old_weights(engine, tiny_llama_dir: Path, kind):
    """Unsuitable weights are refused, results stay the same, and a later valid replacement succeeds."""
    await engine.replace_base(whole_weights(tiny_llama_dir, 1, factor=1.25))
    before = await complete(engine)
    wrong = lora_weights(2) if kind == 'adapter' else whole_weights(tiny_llama_dir, 2, without=EMBEDDINGS)
    with pytest.raises(AdapterMisfit):
        await engine.replace_base(wrong)
    assert not engine.load.is_paused
    assert await complete(engine) == before
    await engine.replace_base(whole_weights(tiny_llama_dir, 3))
    assert (await complete(engine))[2][0][0].version == 3


async def test_the_base_is_not_replaced_during_a_request(engine, tiny_llama_dir: Path):
    """A replacement is refused while a request runs, and does not change the request's result."""
    alone = await run(engine, make_request('one', max_tokens=48, temperature=0))
    sampled = Sampled(1)
    async with aclosing(engine.generate(make_request('one', max_tokens=48, temperature=0))) as events:
        async for event in events:
            with pytest.raises(EngineInUse):
                await engine.replace_base(whole_weights(tiny_llama_dir, 1, factor=1.25))
            sampled.take(event)
            if sampled.tokens[0]:
                break
        async for event in events:
            sampled.take(event)
    assert sampled.tokens == alone.tokens
    await engine.replace_base(whole_weights(tiny_llama_dir, 1, factor=1.25))
