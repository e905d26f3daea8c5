"""What is cached of prompts: shared between requests of the same salt and version, and with nobody else."""

import numpy as np
import pytest

from fixtures.engine_requests import ask, drawn_logprobs, run, settle
from fixtures.sampled import ONE, TWO, Sampled, lora_weights
from services.sampler.domain.adapter import VersionKey
from services.sampler.ports import SamplerEngine

pytestmark = pytest.mark.asyncio(loop_scope='session')

LONG = tuple(3 + (5 * place) % 250 for place in range(200))
NO_KEY = VersionKey(ONE.adapter, 7)


async def continue_long(engine: SamplerEngine, key: VersionKey | None, salt: str = 'alice') -> Sampled:
    """Continue the long prompt greedily."""
    return await run(engine, ask(f'{key} {salt}', key, prompt=LONG, salt=salt, max_tokens=6, temperature=0))


@pytest.mark.parametrize('key', [None, ONE])
async def test_cached_prompt_gives_the_same_answer(real_engine, key):
    """Whatever is found in the cache, the tokens are those of a cold one."""
    cold, warm = [await continue_long(real_engine, key) for _ in range(2)]
    assert cold.prompt.cached_tokens == 0
    assert warm.tokens == cold.tokens
    np.testing.assert_allclose(drawn_logprobs(warm), drawn_logprobs(cold), rtol=0, atol=1e-5)


async def test_vllm_finds_the_prompt_again(vllm_engine):
    """All of the prompt but its last block, which has to be computed to draw from."""
    cold, warm = [await continue_long(vllm_engine, ONE) for _ in range(2)]
    assert cold.prompt.cached_tokens == 0
    assert len(LONG) - 32 <= warm.prompt.cached_tokens < len(LONG)


async def test_cache_never_crosses_versions_or_the_base(real_engine):
    """The same prompt under another version finds nothing, and draws what that version draws cold."""
    cold = {key: await continue_long(real_engine, key, 'apart') for key in (None, ONE, TWO)}
    assert [sampled.prompt.cached_tokens for sampled in cold.values()] == [0, 0, 0]
    await real_engine.reset_prefix_cache()
    for key in (TWO, None, ONE):
        again = await continue_long(real_engine, key, 'apart')
        assert again.prompt.cached_tokens == 0
        assert again.tokens == cold[key].tokens


async def test_cache_never_crosses_salts(real_engine):
    """Another tenant's prompt is not found, so its time tells nothing about what others ask."""
    await continue_long(real_engine, ONE, 'alice')
    assert (await continue_long(real_engine, ONE, 'bob')).prompt.cached_tokens == 0
    assert (await continue_long(real_engine, ONE, '')).prompt.cached_tokens == 0


async def test_reloaded_version_finds_nothing_of_other_weights(real_engine):
    """A key that comes back with other weights, as after a restart elsewhere, draws from those alone."""
    await real_engine.load_adapter(NO_KEY, lora_weights(7))
    first = await continue_long(real_engine, NO_KEY)
    await real_engine.unload_adapter(NO_KEY)
    await real_engine.load_adapter(NO_KEY, lora_weights(8))
    second = await continue_long(real_engine, NO_KEY)
    assert second.prompt.cached_tokens == 0
    assert second.tokens != first.tokens


async def test_reset_forgets_what_ended_requests_left(real_engine):
    """After a reset the same prompt is computed again."""
    for _ in range(2):
        await continue_long(real_engine, ONE, 'reset')
    await settle(real_engine)
    dropped = await real_engine.reset_prefix_cache()
    assert dropped > 0 or real_engine.facts.engine == 'torch'
    assert (await continue_long(real_engine, ONE, 'reset')).prompt.cached_tokens == 0
