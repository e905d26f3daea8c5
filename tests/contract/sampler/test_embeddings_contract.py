"""Contract tests of embeddings: the hidden state of a prompt's last token, as InfoNCE trains it."""

import asyncio

import numpy as np
import pytest

from fixtures.engine_requests import PROMPT, make_request, run
from fixtures.sampled import ONE, TWO, Sampled, lora_weights
from fixtures.tiny_oracle import TinyOracle
from twinkle.data_format import PromptProbe, TensorData
from twinkle_services.sampler.domain.adapter import VersionKey
from twinkle_services.sampler.domain.errors import AdapterMisfit
from twinkle_services.sampler.ports import SamplerEngine

pytestmark = pytest.mark.asyncio(loop_scope='session')

LONG_PROMPT = tuple(3 + (5 * index) % 250 for index in range(90))
"""A prompt of several chunks on the torch engine, and of several blocks of vLLM's cache."""
TOLERANCE = {'rtol': 1e-4, 'atol': 1e-4}
"""Rounding of float32 in a different order; hidden states of the tiny model are of the order of 1."""
BROKEN = VersionKey(ONE.adapter, 7)
"""A version whose weights are NaN."""


async def embed(engine: SamplerEngine, key: VersionKey | None = None, **params) -> Sampled:
    """Run a request for the embedding of a prompt, without new tokens unless `params` say otherwise."""
    given = {'max_tokens': 0, 'prompt_probe': PromptProbe(is_embedding_returned=True), **params}
    return await run(engine, make_request(f'embed {key} {len(given.get("prompt", PROMPT))}', key, **given))


@pytest.mark.parametrize('key', [None, ONE], ids=['base', 'adapter'])
async def test_embedding_is_the_hidden_state_of_transformers(real_engine, tiny_llama_dir, key):
    """Embeddings equal the last hidden state of transformers and peft, for short, chunked and cached prompts."""
    oracle = TinyOracle(tiny_llama_dir, lora_weights(key.version) if key else None)
    for prompt in (PROMPT[:1], PROMPT, LONG_PROMPT, LONG_PROMPT):
        found = (await embed(real_engine, key, prompt=prompt)).prompt
        assert (found.probe.embedding.dtype, found.probe.target_logprobs, found.logprobs) == ('f4', None, None)
        np.testing.assert_allclose(found.probe.embedding, oracle.embedding(prompt), **TOLERANCE)


async def test_prompt_names_the_version_that_computed_it(engine):
    """Prompts of two versions and of the base model have different embeddings, and each names its version."""
    prompts = [(await embed(engine, key)).prompt for key in (None, ONE, TWO)]
    assert [prompt.version for prompt in prompts] == [0, ONE.version, TWO.version]
    first, second, third = [prompt.probe.embedding for prompt in prompts]
    assert not np.array_equal(first, second)
    assert not np.array_equal(second, third)


async def test_embeddings_of_one_batch_do_not_affect_each_other(real_engine):
    """Concurrent embeddings, and a completion that also returns one, equal those of separate requests."""

    def requests() -> list:
        sampled = embed(real_engine, TWO, prompt=LONG_PROMPT[:50], max_tokens=12, num_samples=2)
        return [*(embed(real_engine, key, prompt=LONG_PROMPT) for key in (None, ONE, TWO)), sampled]

    separate = [await request for request in requests()]
    batched = await asyncio.gather(*requests())
    for one, other in zip(separate, batched, strict=True):
        assert one.tokens == other.tokens
        np.testing.assert_allclose(one.prompt.probe.embedding, other.prompt.probe.embedding, **TOLERANCE)


async def test_prompt_without_a_probe_has_no_embedding(engine):
    """A request that does not ask for an embedding receives none."""
    assert (await run(engine, make_request('plain', ONE, max_tokens=1))).prompt.probe is None


async def test_embedding_of_broken_weights_is_refused(real_engine):
    """If the weights compute NaN, the request fails, and names the adapter."""
    weights = lora_weights(BROKEN.version)
    broken = {name: tensor.to_numpy() * np.float32('nan') for name, tensor in weights.tensors.items()}
    tensors = {name: TensorData.from_numpy(array) for name, array in broken.items()}
    await real_engine.load_adapter(BROKEN, lora_weights(BROKEN.version, tensors=tensors))
    with pytest.raises(AdapterMisfit):
        await embed(real_engine, BROKEN)
