"""Contract tests of interrupted sequences that the same engine or the other engine continues."""

import pytest

from fixtures.engine_requests import collect, cut_after, events_of, make_request, run, sampled_logprobs
from fixtures.sampled import ONE, Sampled
from twinkle.data_format import StopReason
from twinkle_services.kit.errors import InvalidField
from twinkle_services.sampler.domain.generation import GenerationRequest, SequenceSoFar
from twinkle_services.sampler.ports import SamplerEngine

pytestmark = pytest.mark.asyncio(loop_scope='session')

PRINTABLE = range(33, 127)
"""Code points of printable ASCII characters other than the space."""


async def run_rest(engine: SamplerEngine, request: GenerationRequest, so_far: SequenceSoFar) -> Sampled:
    """Run the rest of a request with one sequence, and return the sampled rest."""
    rest = GenerationRequest(
        request_id='rest',
        prompt_token_ids=request.prompt_token_ids,
        params=request.params,
        adapter=request.adapter,
        continued=(so_far,),
    )
    return await run(engine, rest)


async def check_interruptions(engine: SamplerEngine, request: GenerationRequest, cuts: range) -> Sampled:
    """Interrupt a request after each number of tokens in `cuts`, compare with the complete run, and return that run."""
    events = await events_of(engine, request)
    whole = collect(events)
    for cut in cuts:
        so_far, text = cut_after(events, cut)
        rest = await run_rest(engine, request, so_far)
        assert [*so_far.token_ids, *rest.tokens[0]] == whole.tokens[0]
        assert text + rest.texts[0] == whole.texts[0]
        assert rest.reasons == whole.reasons
        assert rest.spans == whole.spans
        tolerance = 1e-5 if engine.facts.engine == 'vllm' else 0.0
        expected = sampled_logprobs(whole)[len(so_far.token_ids) :]
        assert sampled_logprobs(rest) == pytest.approx(expected, rel=0, abs=tolerance)
    return whole


@pytest.mark.parametrize('adapter', [None, ONE])
async def test_greedy_sequence_continues_identically(engine, adapter):
    """A greedy sequence that is interrupted after any token has the same result as an uninterrupted run."""
    whole = await check_interruptions(engine, make_request(adapter=adapter, max_tokens=8, temperature=0), range(9))
    ((span,),) = whole.spans
    assert (span.version, span.begin_token, span.end_token) == (adapter.version if adapter else 0, 0, 8)


async def test_seeded_sequence_continues_bitwise(torch_engine):
    """The torch engine continues a seeded sequence with bitwise equal tokens and log-probabilities."""
    await check_interruptions(torch_engine, make_request(adapter=ONE, max_tokens=8, seed=7, top_p=0.9), range(8))


@pytest.mark.parametrize(
    'penalty', [{'repetition_penalty': 1.3}, {'frequency_penalty': 1.5}, {'presence_penalty': 1.5}], ids=str
)
async def test_penalties_count_delivered_tokens(real_engine, penalty):
    """Penalties count the tokens that were delivered before the interruption."""
    await check_interruptions(real_engine, make_request(max_tokens=12, temperature=0, **penalty), range(1, 12, 5))


async def test_min_tokens_counts_from_the_start(real_engine):
    """`min_tokens` counts delivered tokens, so a stop token is suppressed as long as in an uninterrupted run."""
    unlimited = await run(real_engine, make_request(max_tokens=10, temperature=0))
    params = {'max_tokens': 10, 'temperature': 0, 'min_tokens': 6, 'stop': unlimited.tokens[0][:5]}
    whole = await check_interruptions(real_engine, make_request(**params), range(10))
    assert len(whole.tokens[0]) >= 6


async def test_stop_string_is_found_across_the_cut(real_engine):
    """A stop string that spans the interruption ends the sequence and is not part of the text."""
    prompt, stop = await _prompt_with_text(real_engine)
    request = make_request(prompt=prompt, max_tokens=24, temperature=0, stop=stop)
    whole = await check_interruptions(real_engine, request, range(24))
    assert whole.reasons == [StopReason.STOP]
    assert stop not in whole.texts[0]


async def test_a_finished_sequence_has_no_further_events(engine):
    """A sequence that finished before the interruption has no further events."""
    request = make_request(max_tokens=6, temperature=0, num_samples=2)
    whole = await run(engine, request)
    so_far = (
        SequenceSoFar(sequence_index=0, token_ids=tuple(whole.tokens[0]), is_finished=True),
        SequenceSoFar(sequence_index=1, token_ids=tuple(whole.tokens[1][:2])),
    )
    rest = await run(engine, make_request(max_tokens=6, temperature=0, num_samples=2, continued=so_far))
    assert rest.tokens == [[], whole.tokens[1][2:]]
    assert rest.reasons == [None, StopReason.LENGTH]


async def test_a_missing_final_event_is_sent_without_tokens(engine):
    """If all tokens of a sequence were delivered, but not its final event, only the final event is yielded."""
    request = make_request(max_tokens=6, temperature=0)
    whole = await run(engine, request)
    rest = await run_rest(engine, request, SequenceSoFar(sequence_index=0, token_ids=tuple(whole.tokens[0])))
    assert rest.tokens == [[]]
    assert (rest.reasons, rest.spans) == (whole.reasons, whole.spans)


async def test_an_impossible_continuation_is_refused(engine):
    """A continuation with more tokens than the request allows is refused."""
    with pytest.raises(InvalidField) as caught:
        await run_rest(engine, make_request(max_tokens=2), SequenceSoFar(sequence_index=0, token_ids=(5, 6, 7)))
    assert caught.value.field.startswith('continued')


async def test_the_other_engine_continues_a_sequence(torch_engine, vllm_engine):
    """One engine completes a greedy sequence that the other engine started, with identical tokens."""
    request = make_request(adapter=ONE, max_tokens=8, temperature=0)
    for first, second in ((torch_engine, vllm_engine), (vllm_engine, torch_engine)):
        events = await events_of(first, request)
        whole, (so_far, text) = collect(events), cut_after(events, 3)
        rest = await run_rest(second, request, so_far)
        assert [*so_far.token_ids, *rest.tokens[0]] == whole.tokens[0]
        assert text + rest.texts[0] == whole.texts[0]


async def _prompt_with_text(engine: SamplerEngine) -> tuple[list[int], str]:
    """Return a prompt whose greedy completion has three consecutive printable characters, and these characters."""
    for first in range(3, 259):
        text = (await run(engine, make_request(prompt=[1, first], max_tokens=24, temperature=0))).texts[0]
        for begin in range(2, len(text) - 2):
            piece = text[begin : begin + 3]
            if all(ord(character) in PRINTABLE for character in piece) and piece not in text[: begin + 2]:
                return [1, first], piece
    raise AssertionError('no completion of the tiny model has three consecutive printable characters')
