"""Parameters of drawing: both engines read them the same way, and what an engine cannot honour it refuses."""

import json
import re

import pytest

from fixtures.engine_requests import ask, run
from fixtures.sampled import ONE
from services.kit.errors import InvalidField, NotSupportedHere
from services.sampler.domain.generation import SleepLevel
from twinkle.data_format import StopReason, StructuredOutput

pytestmark = pytest.mark.asyncio(loop_scope='session')

PENALTIES = (
    {'repetition_penalty': 1.4},
    {'frequency_penalty': 1.2},
    {'presence_penalty': 1.7},
    {'frequency_penalty': -0.7, 'presence_penalty': 0.4, 'repetition_penalty': 1.1},
)


@pytest.mark.parametrize('penalties', PENALTIES, ids=str)
@pytest.mark.parametrize('key', [None, ONE])
async def test_penalties_mean_the_same_in_both_engines(torch_engine, vllm_engine, penalties, key):
    """Greedy tokens under each penalty are equal, and others than without."""
    request = ask(adapter=key, max_tokens=24, temperature=0, **penalties)
    one, other = [await run(engine, request) for engine in (torch_engine, vllm_engine)]
    free = await run(torch_engine, ask(adapter=key, max_tokens=24, temperature=0))
    assert one.tokens == other.tokens
    assert one.tokens != free.tokens


async def test_one_candidate_left_is_the_likeliest(real_engine):
    """A `min_p` or `top_k` of 1, or a tiny `top_p`, leaves greedy decoding at any temperature."""
    greedy = await run(real_engine, ask(max_tokens=12, temperature=0))
    for params in ({'min_p': 1.0}, {'top_k': 1}, {'top_p': 1e-6}):
        assert (await run(real_engine, ask(max_tokens=12, temperature=1.5, **params))).tokens == greedy.tokens


async def test_min_p_keeps_what_is_likely_enough(real_engine):
    """No drawn token has less than that share of the likeliest one's probability."""
    sampled = await run(real_engine, ask(max_tokens=40, min_p=0.3, logprobs=1, seed=3))
    assert any(entry[0][0] != entry[1][0] for entry in sampled.logprobs[0])
    for own, best in sampled.logprobs[0]:
        assert own[1] - best[1] >= -1.2040  # ln 0.3


async def test_samples_of_a_seed_are_their_own(real_engine):
    """Three samples differ, repeat with the seed, and are others with another seed."""
    first, again = [await run(real_engine, ask(max_tokens=10, num_samples=3, seed=5)) for _ in range(2)]
    other = await run(real_engine, ask(max_tokens=10, num_samples=3, seed=6))
    assert len({tuple(tokens) for tokens in first.tokens}) == 3
    assert first.tokens == again.tokens
    assert not {tuple(tokens) for tokens in first.tokens} & {tuple(tokens) for tokens in other.tokens}


async def test_logprobs_are_before_temperature_and_filters(real_engine):
    """What is reported is the model's own distribution, whatever was drawn from."""
    plain = await run(real_engine, ask(max_tokens=1, temperature=0, logprobs=3))
    hot = await run(real_engine, ask(max_tokens=1, temperature=1.7, top_k=1, logprobs=3))
    assert hot.tokens == plain.tokens
    for one, other in zip(plain.logprobs[0][0], hot.logprobs[0][0], strict=True):
        assert one == pytest.approx(other, abs=1e-5)


async def test_stop_string_is_cut_from_the_text(real_engine):
    """The text ends before it; the tokens that made it are told."""
    free = await run(real_engine, ask(prompt=(1, 60), max_tokens=30, temperature=0))
    begin = next(place for place in range(1, len(free.texts[0])) if free.texts[0][place].isascii())
    stop = free.texts[0][begin]
    stopped = await run(real_engine, ask(prompt=(1, 60), max_tokens=30, temperature=0, stop=stop))
    assert stopped.reasons == [StopReason.STOP]
    assert stopped.texts[0] == free.texts[0][: free.texts[0].index(stop)]
    assert stopped.tokens[0] == free.tokens[0][: len(stopped.tokens[0])]


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
async def test_vllm_holds_the_form_of_the_output(vllm_engine, form, key):
    """Whatever the model would rather say, the text has the form, and then it ends."""
    wanted, is_good = FORMS[form]
    sampled = await run(vllm_engine, ask(adapter=key, max_tokens=400, ignore_eos=False, structured_output=wanted))
    assert sampled.reasons == [StopReason.STOP]
    assert is_good(sampled.texts[0]), sampled.texts[0]


@pytest.mark.parametrize('form', FORMS)
async def test_torch_refuses_the_form_of_the_output(torch_engine, form):
    """The oracle has no grammars; nothing is drawn without one in silence."""
    with pytest.raises(NotSupportedHere):
        await run(torch_engine, ask(max_tokens=4, structured_output=FORMS[form][0]))


async def test_form_that_is_none_is_refused(vllm_engine):
    """A grammar that cannot be read is named, and the engine goes on."""
    with pytest.raises(InvalidField) as caught:
        await run(vllm_engine, ask(max_tokens=4, structured_output=StructuredOutput(regex='(')))
    assert caught.value.field.startswith('params.structured_output')
    assert len((await run(vllm_engine, ask(max_tokens=4))).tokens[0]) == 4


async def test_engine_computes_in_what_the_checkpoint_is_stored_in(real_engine):
    """float32 stays float32, also where vLLM's 'auto' would make bfloat16 of it."""
    assert real_engine.facts.dtype == 'float32'


async def test_sleep_is_refused_where_it_would_free_nothing(real_engine):
    """On a CPU no engine sleeps, and it says so; it goes on serving."""
    with pytest.raises(NotSupportedHere):
        await real_engine.sleep(SleepLevel.WEIGHTS_KEPT)
    await real_engine.wake_up()
    assert not real_engine.load.is_sleeping
    assert len((await run(real_engine, ask(max_tokens=4))).tokens[0]) == 4
