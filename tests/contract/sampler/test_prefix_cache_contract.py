"""Contract tests of the prefix cache. Requests share entries only if they have the same salt and version."""

import numpy as np
import pytest

from fixtures.engine_requests import make_request, run, sampled_logprobs, settle
from fixtures.sampled import ONE, TWO, Sampled, lora_weights
from twinkle_services.sampler.domain.adapter import VersionKey
from twinkle_services.sampler.ports import SamplerEngine

pytestmark = pytest.mark.asyncio(loop_scope='session')

LONG_PROMPT = tuple(3 + (5 * index) % 250 for index in range(200))
RELOADED_KEY = VersionKey(ONE.adapter, 7)


async def complete_long_prompt(engine: SamplerEngine, key: VersionKey | None, salt: str = 'alice') -> Sampled:
    """Continue the long prompt greedily."""
    return await run(
        engine, make_request(f'{key} {salt}', key, prompt=LONG_PROMPT, salt=salt, max_tokens=6, temperature=0)
    )


@pytest.mark.parametrize('key', [None, ONE])
async def test_cached_prompt_gives_the_same_tokens(real_engine, key):
    """A prompt from the cache gives the same tokens as without the cache."""
    cold, warm = [await complete_long_prompt(real_engine, key) for _ in range(2)]
    assert cold.prompt.cached_tokens == 0
    assert warm.tokens == cold.tokens
    np.testing.assert_allclose(sampled_logprobs(warm), sampled_logprobs(cold), rtol=0, atol=1e-5)


async def test_vllm_reuses_a_cached_prompt(vllm_engine):
    """All tokens of a repeated prompt, except at most the last 32, are found in vLLM's cache."""
    cold, warm = [await complete_long_prompt(vllm_engine, ONE) for _ in range(2)]
    assert cold.prompt.cached_tokens == 0
    assert len(LONG_PROMPT) - 32 <= warm.prompt.cached_tokens < len(LONG_PROMPT)


async def test_cache_is_not_shared_between_versions_or_with_the_base(real_engine):
    """A prompt that is cached for one version is not used for another version or the base model."""
    cold = {key: await complete_long_prompt(real_engine, key, 'versions') for key in (None, ONE, TWO)}
    assert [sampled.prompt.cached_tokens for sampled in cold.values()] == [0, 0, 0]
    await real_engine.reset_prefix_cache()
    for key in (TWO, None, ONE):
        again = await complete_long_prompt(real_engine, key, 'versions')
        assert again.prompt.cached_tokens == 0
        assert again.tokens == cold[key].tokens


async def test_cache_is_not_shared_between_salts(real_engine):
    """A prompt that is cached with another salt is not used, so response times reveal nothing about other tenants."""
    await complete_long_prompt(real_engine, ONE, 'alice')
    assert (await complete_long_prompt(real_engine, ONE, 'bob')).prompt.cached_tokens == 0
    assert (await complete_long_prompt(real_engine, ONE, '')).prompt.cached_tokens == 0


async def test_a_reloaded_version_does_not_use_old_prefixes(real_engine):
    """A version that is reloaded with other weights does not use prefixes that were cached for the old weights."""
    await real_engine.load_adapter(RELOADED_KEY, lora_weights(7))
    first = await complete_long_prompt(real_engine, RELOADED_KEY)
    await real_engine.unload_adapter(RELOADED_KEY)
    await real_engine.load_adapter(RELOADED_KEY, lora_weights(8))
    second = await complete_long_prompt(real_engine, RELOADED_KEY)
    assert second.prompt.cached_tokens == 0
    assert second.tokens != first.tokens


async def test_reset_discards_cached_prefixes(real_engine):
    """A prompt is computed again after a reset of the prefix cache."""
    for _ in range(2):
        await complete_long_prompt(real_engine, ONE, 'reset')
    await settle(real_engine)
    dropped = await real_engine.reset_prefix_cache()
    assert dropped > 0 or real_engine.facts.engine == 'torch'
    assert (await complete_long_prompt(real_engine, ONE, 'reset')).prompt.cached_tokens == 0
