"""Contract tests of sampling parameters: equal effects in both engines, and errors for unsupported parameters."""

import asyncio
import json
import re

import pytest

from fixtures.engine_requests import make_request, run
from fixtures.sampled import ONE
from twinkle.data_format import StopReason, StructuredOutput
from twinkle_services.kit.errors import InvalidField, NotSupportedHere
from twinkle_services.sampler.domain.generation import SleepLevel

pytestmark = pytest.mark.asyncio(loop_scope='session')

PENALTIES = (
    {'repetition_penalty': 1.4},
    {'frequency_penalty': 1.2},
    {'presence_penalty': 1.7},
    {'frequency_penalty': -0.7, 'presence_penalty': 0.4, 'repetition_penalty': 1.1},
)


@pytest.mark.parametrize('penalties', PENALTIES, ids=str)
@pytest.mark.parametrize('key', [None, ONE])
async def test_penalties_are_equal_in_both_engines(torch_engine, vllm_engine, penalties, key):
    """Both engines give equal greedy tokens with a penalty, and these differ from the tokens without a penalty."""
    request = make_request(adapter=key, max_tokens=24, temperature=0, **penalties)
    first, second = [await run(engine, request) for engine in (torch_engine, vllm_engine)]
    plain = await run(torch_engine, make_request(adapter=key, max_tokens=24, temperature=0))
    assert first.tokens == second.tokens
    assert first.tokens != plain.tokens


async def test_a_single_candidate_is_the_most_likely_token(real_engine):
    """A `min_p` or `top_k` of 1, or a tiny `top_p`, gives greedy tokens even at a temperature above 1."""
    greedy = await run(real_engine, make_request(max_tokens=12, temperature=0))
    for params in ({'min_p': 1.0}, {'top_k': 1}, {'top_p': 1e-6}):
        assert (await run(real_engine, make_request(max_tokens=12, temperature=1.5, **params))).tokens == greedy.tokens


async def test_min_p_is_relative_to_the_most_likely_token(real_engine):
    """Every sampled token has at least `min_p` times the probability of the most likely token."""
    sampled = await run(real_engine, make_request(max_tokens=40, min_p=0.3, logprobs=1, seed=3))
    assert any(entry[0][0] != entry[1][0] for entry in sampled.logprobs[0])
    for chosen, best in sampled.logprobs[0]:
        assert chosen[1] - best[1] >= -1.2040  # ln 0.3


async def test_samples_depend_on_the_seed(real_engine):
    """Three samples of a request differ; the same seed repeats them, and a new seed gives other samples."""
    first, again = [await run(real_engine, make_request(max_tokens=10, num_samples=3, seed=5)) for _ in range(2)]
    other = await run(real_engine, make_request(max_tokens=10, num_samples=3, seed=6))
    assert len({tuple(tokens) for tokens in first.tokens}) == 3
    assert first.tokens == again.tokens
    assert not {tuple(tokens) for tokens in first.tokens} & {tuple(tokens) for tokens in other.tokens}


async def test_seeded_samples_do_not_depend_on_divided_prompts(real_engine):
    """If the prompts of seeded requests together exceed a step, each request gives the same tokens as alone."""
    prompts = [tuple(range(2 + start, 2 + start + 150)) for start in range(6)]
    requests = [
        make_request(f'seeded {seed}', prompt=prompt, max_tokens=6, num_samples=2, seed=seed)
        for seed, prompt in enumerate(prompts)
    ]
    # The requests run together first, because a later request would find its prompt in the cache.
    together = await asyncio.gather(*(run(real_engine, request) for request in requests))
    assert [result.tokens for result in together] == [(await run(real_engine, request)).tokens for request in requests]


async def test_logprobs_are_before_temperature_and_filters(real_engine):
    """Reported log-probabilities are those of the model, before temperature and filters."""
    plain = await run(real_engine, make_request(max_tokens=1, temperature=0, logprobs=3))
    sampled_hot = await run(real_engine, make_request(max_tokens=1, temperature=1.7, top_k=1, logprobs=3))
    assert sampled_hot.tokens == plain.tokens
    for one, other in zip(plain.logprobs[0][0], sampled_hot.logprobs[0][0], strict=True):
        assert one == pytest.approx(other, abs=1e-5)


async def test_stop_string_is_not_part_of_the_text(real_engine):
    """The text ends before the stop string, and the tokens are a prefix of the tokens without a stop string."""
    plain = await run(real_engine, make_request(prompt=(1, 60), max_tokens=30, temperature=0))
    begin = next(index for index in range(1, len(plain.texts[0])) if plain.texts[0][index].isascii())
    stop = plain.texts[0][begin]
    stopped = await run(real_engine, make_request(prompt=(1, 60), max_tokens=30, temperature=0, stop=stop))
    assert stopped.reasons == [StopReason.STOP]
    assert stopped.texts[0] == plain.texts[0][: plain.texts[0].index(stop)]
    assert stopped.tokens[0] == plain.tokens[0][: len(stopped.tokens[0])]


FORMS = {
    'choices': (StructuredOutput(choices=('yes', 'no')), lambda text: text in {'yes', 'no'}),
    'regex': (
        StructuredOutput(regex='[ab]{3}-[0-9]{2}'),
        lambda text: re.fullmatch('[ab]{3}-[0-9]{2}', text),
    ),
    'json_schema': (
        StructuredOutput(
            json_schema={
                'type': 'object',
                'properties': {'is_good': {'type': 'boolean'}},
                'required': ['is_good'],
                'additionalProperties': False,
            }
        ),
        lambda text: isinstance(json.loads(text)['is_good'], bool),
    ),
    'grammar': (StructuredOutput(grammar='root ::= "left" | "right"'), lambda text: text in {'left', 'right'}),
}


@pytest.mark.parametrize('form', FORMS)
@pytest.mark.parametrize('key', [None, ONE])
@pytest.mark.slow
async def test_vllm_enforces_structured_output(vllm_engine, form, key):
    """Text for a structured output has the requested structure, and then generation stops."""
    output, is_valid = FORMS[form]
    sampled = await run(
        vllm_engine, make_request(adapter=key, max_tokens=400, ignore_eos=False, structured_output=output)
    )
    assert sampled.reasons == [StopReason.STOP]
    assert is_valid(sampled.texts[0]), sampled.texts[0]


@pytest.mark.parametrize('form', FORMS)
async def test_torch_refuses_structured_output(torch_engine, form):
    """The torch engine refuses structured output instead of ignoring it."""
    with pytest.raises(NotSupportedHere):
        await run(torch_engine, make_request(max_tokens=4, structured_output=FORMS[form][0]))


async def test_malformed_structured_output_is_refused(vllm_engine):
    """A malformed regular expression is refused, and the engine remains usable."""
    with pytest.raises(InvalidField) as caught:
        await run(vllm_engine, make_request(max_tokens=4, structured_output=StructuredOutput(regex='(')))
    assert caught.value.field.startswith('params.structured_output')
    assert len((await run(vllm_engine, make_request(max_tokens=4))).tokens[0]) == 4


async def test_engine_uses_the_stored_dtype(real_engine):
    """A float32 checkpoint is computed in float32, although vLLM's 'auto' would select bfloat16."""
    assert real_engine.facts.dtype == 'float32'


async def test_sleep_is_refused_on_a_cpu(real_engine):
    """Engines on a CPU refuse to sleep and remain usable."""
    with pytest.raises(NotSupportedHere):
        await real_engine.sleep(SleepLevel.WEIGHTS_KEPT)
    await real_engine.wake_up()
    assert not real_engine.load.is_sleeping
    assert len((await run(real_engine, make_request(max_tokens=4))).tokens[0]) == 4
