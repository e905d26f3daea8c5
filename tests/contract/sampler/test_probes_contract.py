"""Contract tests of prompt probes: scores of given tokens, and drawn tokens, at each position of a prompt."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from fixtures.engine_requests import PROMPT, events_of, make_request, run, settle
from fixtures.sampled import ONE, TWO, Sampled, lora_tensors, lora_weights
from fixtures.tiers import mostly_slow
from fixtures.tiny_oracle import TinyOracle
from twinkle.data_format import PromptProbe, StopReason, TensorData
from twinkle_services.kit.errors import InvalidField
from twinkle_services.sampler.domain.adapter import VersionKey
from twinkle_services.sampler.domain.generation import SequenceFinished
from twinkle_services.sampler.ports import SamplerEngine

pytestmark = pytest.mark.asyncio(loop_scope='session')

LONG_PROMPT = tuple(3 + (5 * index) % 250 for index in range(90))
"""A prompt of several chunks on the torch engine, and of several blocks of vLLM's cache."""
MILD = VersionKey(ONE.adapter, 5)
"""A version with smaller weights than other versions, so that rounding errors stay below the tolerance."""
TOLERANCE = {'torch': 1e-5, 'vllm': 2e-5}
"""Maximum difference of a log-probability from transformers in float32; vLLM adds in a different order."""
SHARED_STEP_TOLERANCE = {'torch': 0.0, 'vllm': 1e-4}
"""Maximum difference between a request in a shared step and the same request alone. vLLM's rounding depends on the
requests of a step; 2.8e-5 was measured, and other contract tests of vLLM allow 1e-4."""


def some_targets(rows: int, columns: int = 6) -> np.ndarray:
    """Return int32 [rows, columns] tokens. About 40% of them are -1, which requests no token; some rows are all -1."""
    random = np.random.default_rng(rows)
    targets = random.integers(0, 256, (rows, columns)).astype(np.int32)
    targets[random.random(targets.shape) < 0.3] = -1
    targets[1::7] = -1
    return targets


async def oracle_of(engine: SamplerEngine, folder: Path, *, has_adapter: bool) -> TinyOracle:
    """Return a reference for the base model, or load the version `MILD` and return a reference for this version."""
    if not has_adapter:
        return TinyOracle(folder)
    tensors = {name: tensor.to_numpy() * np.float32(0.2) for name, tensor in lora_tensors(MILD.version).items()}
    weights = lora_weights(
        MILD.version, tensors={name: TensorData.from_numpy(array) for name, array in tensors.items()}
    )
    await engine.load_adapter(MILD, weights)
    return TinyOracle(folder, weights)


async def probe(engine: SamplerEngine, key: VersionKey | None = None, **params) -> Sampled:
    """Run a request for the long prompt, with a probe of `targets` and `draws`."""
    wanted = PromptProbe(target_token_ids=params.pop('targets', None), draw_count=params.pop('draws', 0))
    given = {'prompt': LONG_PROMPT, 'max_tokens': 1, **params}
    return await run(engine, make_request(f'probe {key}', key, prompt_probe=wanted, **given))


@pytest.mark.parametrize('key', [None, MILD], ids=['base', 'adapter'])
async def test_targets_have_the_log_probabilities_of_transformers(real_engine, tiny_llama_dir, key):
    """Each requested token has the log-probability that transformers computes, with and without a cached prefix."""
    targets = some_targets(len(LONG_PROMPT) - 1)
    oracle = await oracle_of(real_engine, tiny_llama_dir, has_adapter=key is not None)
    expected = np.take_along_axis(oracle.distributions(LONG_PROMPT), targets.clip(0), 1)
    expected[targets < 0] = np.nan
    for max_tokens in (0, 3, 3):
        found = (await probe(real_engine, key, targets=targets, max_tokens=max_tokens)).prompt
        assert (found.logprobs, found.probe.drawn_token_ids, found.probe.target_logprobs.dtype) == (None, None, 'f4')
        tolerance = TOLERANCE[real_engine.facts.engine]
        np.testing.assert_allclose(found.probe.target_logprobs, expected, rtol=0, atol=tolerance)


async def test_probes_and_other_requests_in_one_batch_do_not_affect_each_other(real_engine):
    """Probes of several versions, and requests for the most likely tokens, give the results of separate requests."""
    targets = some_targets(len(LONG_PROMPT) - 1)

    def probes() -> list:
        return [probe(real_engine, key, targets=targets, draws=2, prompt_logprobs=2) for key in (None, ONE, TWO)]

    def others() -> list:
        return [
            run(real_engine, make_request(f'other {key}', key, max_tokens=40, logprobs=count, temperature=0))
            for key, count in ((None, 4), (TWO, 9))
        ]

    separate = [await one for one in (*probes(), *others())]
    batched = await asyncio.gather(*probes(), *others())
    tolerance = SHARED_STEP_TOLERANCE[real_engine.facts.engine]
    for one, other in zip(separate, batched, strict=True):
        assert one.tokens == other.tokens
        for entry, same in zip(one.logprobs[0], other.logprobs[0], strict=True):
            assert [token for token, _ in entry] == [token for token, _ in same]
            np.testing.assert_allclose([item[1] for item in entry], [item[1] for item in same], rtol=0, atol=tolerance)
    for one, other in zip(separate[:3], batched[:3], strict=True):
        first, second = one.prompt.probe, other.prompt.probe
        np.testing.assert_array_equal(first.drawn_token_ids, second.drawn_token_ids)
        for name in ('target_logprobs', 'drawn_logprobs'):
            np.testing.assert_allclose(getattr(first, name), getattr(second, name), rtol=0, atol=tolerance)
    assert len({sampled.prompt.probe.drawn_token_ids.tobytes() for sampled in separate[:3]}) == 3


@pytest.mark.parametrize('temperature', mostly_slow([0.25, 0.0, 2.0]))
async def test_draws_follow_the_distribution_at_the_temperature(real_engine, tiny_llama_dir, temperature):
    """The most likely token is drawn as often as the temperature implies; log-probabilities ignore the temperature."""
    oracle = await oracle_of(real_engine, tiny_llama_dir, has_adapter=True)
    drawn = (await probe(real_engine, MILD, draws=60, temperature=temperature, top_k=1)).prompt.probe
    rows = len(LONG_PROMPT) - 1
    assert drawn.target_logprobs is None
    assert drawn.drawn_token_ids.shape == drawn.drawn_logprobs.shape == (rows, 60)
    logprobs = oracle.distributions(LONG_PROMPT)
    expected = np.take_along_axis(logprobs, drawn.drawn_token_ids, 1)
    np.testing.assert_allclose(drawn.drawn_logprobs, expected, rtol=0, atol=TOLERANCE[real_engine.facts.engine])
    best = logprobs.argmax(1)
    is_best = drawn.drawn_token_ids == best[:, None]
    if temperature == 0:
        assert is_best.all()
        return
    tempered = np.exp(logprobs / temperature)
    chances = (tempered / tempered.sum(1, keepdims=True))[np.arange(rows), best]
    deviation = np.sqrt((chances * (1 - chances)).sum() * 60)
    assert abs(is_best.sum() - chances.sum() * 60) < 5 * deviation


async def test_seed_repeats_draws(real_engine):
    """The same seed gives the same drawn tokens; another seed, and the next draw, give different tokens."""
    first, again, other = [
        (await probe(real_engine, draws=4, seed=seed, temperature=2)).prompt.probe.drawn_token_ids for seed in (1, 1, 2)
    ]
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    assert (first[:, 0] != first[:, 1]).any()


async def test_prompt_of_one_token_has_an_empty_result(real_engine):
    """A prompt of one token has no position to probe, and its matrices have no rows."""
    empty = np.empty((0, 2), np.int32)
    found = (await probe(real_engine, prompt=PROMPT[:1], targets=empty, draws=3)).prompt.probe
    assert (found.target_logprobs.shape, found.drawn_token_ids.shape) == ((0, 2), (0, 3))


@pytest.mark.parametrize(
    'targets',
    [
        np.zeros((2, 1), np.int32),
        np.zeros((4, 1), np.int32),
        np.full((3, 1), -2, np.int32),
        np.full((3, 1), 100_000, np.int32),
    ],
)
async def test_targets_that_do_not_fit_the_prompt_are_refused(real_engine, targets):
    """The error for targets with a wrong number of rows, or outside the vocabulary, names the field."""
    with pytest.raises(InvalidField) as refusal:
        await probe(real_engine, prompt=PROMPT, targets=targets)
    assert refusal.value.field == 'params.prompt_probe.target_token_ids'
    await settle(real_engine)
    assert real_engine.load.running_sequences == real_engine.load.waiting_sequences == 0


async def test_abort_ends_a_request_while_it_is_probed(real_engine):
    """If a request is aborted while its prompt is probed, the request ends and the engine is idle afterwards."""
    wanted = PromptProbe(draw_count=128)
    request = make_request('long', prompt=LONG_PROMPT, max_tokens=300, prompt_probe=wanted)
    running = asyncio.create_task(events_of(real_engine, request))
    # When the other request ends, the engine has begun the probe.
    await run(real_engine, make_request('other', max_tokens=8))
    await real_engine.abort('long')
    last = (await running)[-1]
    assert isinstance(last, SequenceFinished)
    assert last.stop_reason is StopReason.ABORT
    await settle(real_engine)
    assert real_engine.load.running_sequences == 0
