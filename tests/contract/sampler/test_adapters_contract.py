"""Contract tests of adapter versions, compared with transformers and PEFT."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fixtures.engine_requests import make_request, run, sampled_logprobs, score, settle
from fixtures.sampled import LORA, ONE, TWO, lora_weights
from fixtures.sampler_engines import VLLM_SLOTS
from fixtures.tiny_model import HIDDEN, VOCAB_SIZE
from fixtures.tiny_oracle import TinyOracle
from twinkle.data_format import LoraConfig, PromptProbe, TensorData
from twinkle_services.kit.errors import VersionNotFound
from twinkle_services.sampler.domain.adapter import AdapterWeights, VersionKey
from twinkle_services.sampler.domain.errors import AdapterMisfit

pytestmark = pytest.mark.asyncio(loop_scope='session')

TEXT = tuple(3 + (7 * index) % 250 for index in range(60))
BOUND = 1e-4
"""Maximum difference between log-probabilities here and those of transformers and PEFT, in float32."""
CHOSEN = np.array([[-1, -1], [-1, 7], [-1, -1]], np.int32)
"""A token to score at one position of the short prompt; -1 requests no score."""
CONFIGS = {
    'alpha': LORA,
    'rslora': replace(LORA, use_rslora=True),
    'alpha_pattern': replace(LORA, alpha_pattern={'q_proj': 9.0}),
    'bfloat16': LORA,
}
"""LoRA configurations by the property that they test. The weights of `bfloat16` have this dtype."""


@pytest.fixture(scope='module')
def oracles(tiny_llama_dir: Path) -> dict[VersionKey | None, TinyOracle]:
    """Reference models: the base model and the versions that are loaded for every test."""
    versions = {key: TinyOracle(tiny_llama_dir, lora_weights(key.version)) for key in (ONE, TWO)}
    return {None: TinyOracle(tiny_llama_dir), **versions}


def weights_of(version: int, config: LoraConfig, *, dtype: str = 'float32') -> AdapterWeights:
    """Return the weights of a version with this configuration, optionally truncated to bfloat16."""
    weights = replace(lora_weights(version), lora_config=config)
    if dtype == 'float32':
        return weights
    truncated = {name: _truncate_to_bfloat16(tensor) for name, tensor in weights.tensors.items()}
    return replace(weights, tensors=truncated, size_bytes=weights.size_bytes // 2)


def check_scores(found: np.ndarray, oracle: TinyOracle, text: Sequence[int]) -> None:
    """Compare log-probabilities with those of PEFT.

    The difference may exceed `BOUND` by twice the rounding error of PEFT in float32. On an Intel Xeon with AVX-512,
    vLLM differs by 1.5e-4 at a position where PEFT's rounding error is 4e-5.
    """
    differences = np.abs(found - oracle.score(text))
    assert np.all(differences <= BOUND + 2 * oracle.rounding_errors(text)), differences.max()


async def test_prompt_log_probabilities_equal_those_of_peft(real_engine, oracles):
    """Prompts of several lengths in one batch, with and without adapters, have PEFT's log-probabilities."""
    requested = [(key, TEXT[:length]) for key in (ONE, None, TWO) for length in (60, 37, 14)]
    found = await asyncio.gather(*(score(real_engine, key, text) for key, text in requested))
    for (key, text), logprobs in zip(requested, found, strict=True):
        check_scores(logprobs, oracles[key], text)


@pytest.mark.parametrize('key', [None, ONE, TWO])
async def test_greedy_tokens_equal_those_of_generate(real_engine, oracles, key):
    """Greedy tokens and log-probabilities equal those of `generate` while other requests run."""
    others = [make_request(f'other {index}', (None, ONE, TWO)[index], max_tokens=20, seed=index) for index in range(3)]
    completion, *_ = await asyncio.gather(
        *(run(real_engine, request) for request in [make_request(adapter=key, max_tokens=16, temperature=0), *others])
    )
    assert completion.tokens[0] == oracles[key].greedy(completion.prompt.token_ids, 16)
    whole = [*completion.prompt.token_ids, *completion.tokens[0]]
    np.testing.assert_allclose(sampled_logprobs(completion), oracles[key].score(whole)[-16:], rtol=0, atol=BOUND)


@pytest.mark.parametrize('name', CONFIGS)
async def test_updates_are_scaled_once(real_engine, tiny_llama_dir, name):
    """Alpha, alpha patterns and rank stabilization are applied once, even after a version is reloaded."""
    weights = weights_of(3, CONFIGS[name], dtype='bfloat16' if name == 'bfloat16' else 'float32')
    key = VersionKey(ONE.adapter, 3)
    expected = TinyOracle(tiny_llama_dir, weights).score(TEXT)
    await real_engine.load_adapter(key, weights)
    first = await score(real_engine, key, TEXT)
    np.testing.assert_allclose(first, expected, rtol=0, atol=BOUND)
    for _ in range(2):
        await real_engine.unload_adapter(key)
        await real_engine.load_adapter(key, weights)
        np.testing.assert_allclose(await score(real_engine, key, TEXT), first, rtol=0, atol=1e-6)


async def test_more_versions_than_slots_are_supported(real_engine, tiny_llama_dir):
    """Concurrent requests for three times as many versions as slots each use the right version."""
    keys = [VersionKey(ONE.adapter, version) for version in range(10, 10 + 3 * VLLM_SLOTS)]
    for key in keys:
        await real_engine.load_adapter(key, lora_weights(key.version))
    expected = {key: TinyOracle(tiny_llama_dir, lora_weights(key.version)).score(TEXT) for key in keys}
    for order in (keys, keys[::-1]):
        found = await asyncio.gather(*(score(real_engine, key, TEXT) for key in order))
        for key, logprobs in zip(order, found, strict=True):
            np.testing.assert_allclose(logprobs, expected[key], rtol=0, atol=BOUND)


async def test_base_requests_use_no_adapter_while_every_slot_is_in_use(real_engine, oracles):
    """Requests for the base model use no adapter, even if other requests use every slot."""
    others_running = [
        make_request(f'other {index}', (ONE, TWO)[index % 2], max_tokens=24, seed=index) for index in range(4)
    ]
    tasks = [asyncio.create_task(run(real_engine, request)) for request in others_running]
    await settle(real_engine)
    base = await run(real_engine, make_request('base', max_tokens=16, temperature=0))
    await asyncio.gather(*tasks)
    assert base.tokens[0] == oracles[None].greedy(base.prompt.token_ids, 16)
    whole = [*base.prompt.token_ids, *base.tokens[0]]
    np.testing.assert_allclose(sampled_logprobs(base), oracles[None].score(whole)[-16:], rtol=0, atol=BOUND)


async def test_a_version_that_is_not_loaded_is_refused(real_engine, oracles):
    """A request for an unknown version fails, and affects no concurrent or later request."""
    concurrent = asyncio.create_task(run(real_engine, make_request('concurrent', ONE, max_tokens=24)))
    await settle(real_engine)
    with pytest.raises(VersionNotFound):
        await run(real_engine, make_request('unknown', VersionKey(ONE.adapter, 99), max_tokens=4))
    assert len((await concurrent).tokens[0]) == 24
    check_scores(await score(real_engine, ONE, TEXT), oracles[ONE], TEXT)


async def test_unloaded_version_is_refused(real_engine):
    """A request for an unloaded version is refused."""
    await real_engine.unload_adapter(TWO)
    with pytest.raises(VersionNotFound):
        await run(real_engine, make_request('unloaded', TWO, max_tokens=4))


async def test_loading_does_not_affect_running_requests(real_engine):
    """Loading and unloading versions does not change the result of a running request."""
    alone = await run(real_engine, make_request('one', ONE, max_tokens=48, temperature=0))
    task = asyncio.create_task(run(real_engine, make_request('one', ONE, max_tokens=48, temperature=0)))
    for version in range(20, 24):
        key = VersionKey(ONE.adapter, version)
        await real_engine.load_adapter(key, lora_weights(version))
        await real_engine.unload_adapter(key)
    assert (await task).tokens == alone.tokens


async def test_a_failed_load_during_a_pause_has_no_effect(real_engine):
    """A load that is refused during a pause does not end the pause, and other versions can be loaded."""
    alone = await run(real_engine, make_request('one', ONE, max_tokens=24, temperature=0))
    running = asyncio.create_task(run(real_engine, make_request('one', ONE, max_tokens=24, temperature=0)))
    await settle(real_engine)
    await real_engine.pause()
    unknown = {'unknown': TensorData.from_numpy(np.zeros((2, 2), dtype=np.float32))}
    with pytest.raises(AdapterMisfit):
        await real_engine.load_adapter(VersionKey(ONE.adapter, 30), lora_weights(30, tensors=unknown))
    good = VersionKey(ONE.adapter, 31)
    await real_engine.load_adapter(good, lora_weights(31))
    assert real_engine.load.is_paused
    waiting = asyncio.create_task(run(real_engine, make_request('waiting', good, max_tokens=8, temperature=0)))
    await real_engine.resume()
    assert (await running).tokens == alone.tokens
    assert (await waiting).versions == {31}


async def test_vllm_refuses_an_adapter_of_the_output_head(vllm_engine):
    """The vLLM engine refuses an adapter of the output head instead of ignoring the head."""
    head = {
        f'base_model.model.lm_head.lora_{part}.weight': TensorData.from_numpy(np.ones(shape, np.float32))
        for part, shape in (('A', (LORA.r, HIDDEN)), ('B', (VOCAB_SIZE, LORA.r)))
    }
    weights = lora_weights(40, tensors={**lora_weights(40).tensors, **head})
    config = replace(LORA, target_modules=(*LORA.target_modules, 'output-head'))
    with pytest.raises(AdapterMisfit):
        await vllm_engine.load_adapter(VersionKey(ONE.adapter, 40), replace(weights, lora_config=config))


async def test_the_torch_engine_supports_an_adapter_of_the_output_head(torch_engine):
    """An adapter of the output head changes the log-probabilities of the prompt in the torch engine."""
    plain = await score(torch_engine, None, TEXT)
    head = {
        f'base_model.model.lm_head.lora_{part}.weight': TensorData.from_numpy(np.eye(*shape, dtype=np.float32))
        for part, shape in (('A', (LORA.r, HIDDEN)), ('B', (VOCAB_SIZE, LORA.r)))
    }
    config = replace(LORA, target_modules='output-head', rank_pattern={}, alpha_pattern={})
    key = VersionKey(ONE.adapter, 41)
    await torch_engine.load_adapter(key, replace(lora_weights(41, tensors=head), lora_config=config))
    assert not np.allclose(await score(torch_engine, key, TEXT), plain)
    np.testing.assert_array_equal(await score(torch_engine, None, TEXT), plain)


def _truncate_to_bfloat16(tensor: TensorData) -> TensorData:
    """Return a float32 tensor truncated to bfloat16."""
    upper_halves = np.frombuffer(tensor.data, dtype='<u2')[1::2]
    return TensorData(dtype='bfloat16', shape=tensor.shape, data=upper_halves.tobytes())


@pytest.mark.parametrize('temperature', [0.0, 1.0])
async def test_nan_weights_fail_only_the_requests_that_use_them(real_engine, temperature):
    """Requests for a version with NaN weights fail with the adapter's id; other requests are not affected."""
    key = VersionKey(ONE.adapter, 77)
    weights = lora_weights(77)
    nan_weights = {
        name: TensorData.from_numpy(np.full(tensor.shape, np.nan, np.float32))
        for name, tensor in weights.tensors.items()
    }
    expected = await score(real_engine, ONE, TEXT)
    await real_engine.load_adapter(key, replace(weights, tensors=nan_weights))
    for requested in (
        run(real_engine, make_request('sampled', key, max_tokens=4, temperature=temperature)),
        score(real_engine, key, TEXT),
        run(real_engine, make_request('probed', key, max_tokens=0, prompt_probe=PromptProbe(draw_count=2))),
        run(real_engine, make_request('scored', key, max_tokens=0, prompt_probe=PromptProbe(target_token_ids=CHOSEN))),
    ):
        with pytest.raises(AdapterMisfit) as caught:
            await requested
        assert (caught.value.adapter_id, caught.value.reason) == (ONE.adapter.name, 'ADAPTER_NOT_READY')
    await real_engine.unload_adapter(key)
    np.testing.assert_allclose(await score(real_engine, ONE, TEXT), expected, rtol=0, atol=BOUND)
