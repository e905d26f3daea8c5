"""Unit tests of sequences that another engine started: the torch engine continues them with bitwise equal results."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from fixtures.engine_runs import PROMPTS, Gathered, drain, make_adapter, make_engine, run_all
from twinkle.data_format import SamplingParams, StopReason, StructuredOutput
from twinkle.nn import PackedCausalLM
from twinkle.sampler.engine import EngineAdapter, SamplerEngine, SequenceSoFar
from twinkle.sampler.errors import InvalidContinuation, NotSupportedByEngine

LONG = list(range(3, 43))


@pytest.fixture(scope='module')
def model(tiny_llama_dir: Path) -> PackedCausalLM:
    """Tiny model that all engines share."""
    return PackedCausalLM.load(tiny_llama_dir)


@pytest.fixture(scope='module')
def tokenizer(tiny_llama_dir: Path) -> Tokenizer:
    """The tokenizer of the tiny model."""
    return Tokenizer.from_file(str(tiny_llama_dir / 'tokenizer.json'))


@pytest.fixture(scope='module')
def adapter(model: PackedCausalLM) -> EngineAdapter:
    """An adapter that changes the sampled tokens."""
    return make_adapter(model, 'a', 0)


@pytest.fixture(scope='module')
def run_factory(model: PackedCausalLM, tokenizer: Tokenizer, adapter: EngineAdapter) -> 'RunFactory':
    """A factory of engines and interrupted runs with the adapter."""
    return RunFactory(model, tokenizer, adapter)


class RunFactory:
    """Factory of engines and interrupted runs."""

    def __init__(self, model: PackedCausalLM, tokenizer: Tokenizer, adapter: EngineAdapter):
        self._model, self._tokenizer, self._adapter = model, tokenizer, adapter

    def engine(self) -> SamplerEngine:
        """Return a new engine."""
        return make_engine(self._model, self._tokenizer)

    def __call__(self, prompt: list[int], params: SamplingParams) -> 'InterruptedRun':
        """Run a request to the end."""
        return InterruptedRun(self.engine(), prompt, params, self._adapter)


class InterruptedRun:
    """A complete run, and the part of it that a reader has received at an interruption."""

    def __init__(self, engine: SamplerEngine, prompt: list[int], params: SamplingParams, adapter: EngineAdapter | None):
        self.params, self.prompt, self.adapter = params, prompt, adapter
        self.whole = Gathered(params.num_samples)
        self.events: list = []
        engine.add_request('it', prompt, params, adapter=adapter)
        while not engine.is_idle:
            for event in engine.step():
                self.whole.take(event)
                self.events.append(event)

    def continue_on(self, engine: SamplerEngine, delivered: int) -> tuple[Gathered, Gathered]:
        """Return the results of the first `delivered` events, and another engine's results after these events."""
        before, after = (Gathered(self.params.num_samples) for _ in range(2))
        for event in self.events[:delivered]:
            before.take(event)
        so_far = [
            SequenceSoFar(token_ids=tuple(tokens), is_finished=reason is not None)
            for tokens, reason in zip(before.tokens, before.reasons, strict=True)
        ]
        engine.add_request('it', self.prompt, self.params, adapter=self.adapter, continued=so_far)
        drain(engine, {'it': after})
        return before, after

    def check(self, engine: SamplerEngine, delivered: int) -> None:
        """Compare both parts with the complete run."""
        before, after = self.continue_on(engine, delivered)
        assert after.prompt is None
        for index in range(self.params.num_samples):
            assert before.tokens[index] + after.tokens[index] == self.whole.tokens[index]
            assert before.logprobs[index] + after.logprobs[index] == self.whole.logprobs[index]
            assert before.texts[index] + after.texts[index] == self.whole.texts[index]
            assert (before.reasons[index] is None) != (after.reasons[index] is None)
            assert (before.reasons[index] or after.reasons[index]) == self.whole.reasons[index]
            assert (before.spans[index] or after.spans[index]) == self.whole.spans[index]


OPTIONS = (
    {},
    {'temperature': 0},
    {'top_p': 0.9, 'logprobs': 2},
    {'repetition_penalty': 1.2, 'min_tokens': 6},
    {'presence_penalty': 0.7, 'frequency_penalty': 0.5, 'min_p': 0.01},
)


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prompt=st.sampled_from([*PROMPTS, LONG]),
    given_params=st.builds(
        lambda options, **fields: SamplingParams(max_tokens=8, stop=['e', 'th'], **fields, **options),
        st.sampled_from(OPTIONS),
        seed=st.integers(0, 1000),
        num_samples=st.integers(1, 3),
        ignore_eos=st.booleans(),
    ),
    fraction=st.floats(0, 1),
)
def test_continued_run_equals_the_uninterrupted_one(run_factory, prompt, given_params, fraction):
    """A continued run gives the tokens, log-probabilities, text, stop reasons and spans of one engine."""
    run = run_factory(prompt, given_params)
    run.check(run_factory.engine(), round(fraction * len(run.events)))


def test_continued_runs_are_not_affected_by_other_requests(model, tokenizer, adapter):
    """An interrupted run continues identically in a small engine; a request in the same batch is not affected."""
    params = SamplingParams(max_tokens=9, seed=3, num_samples=2, ignore_eos=True)
    other = SamplingParams(max_tokens=12, ignore_eos=True, seed=9)
    run = InterruptedRun(make_engine(model, tokenizer), LONG, params, adapter)
    for delivered in range(0, len(run.events) + 1, 7):
        engine = make_engine(model, tokenizer, max_sequences=3, max_batch_tokens=19)
        other_result = Gathered(1)
        engine.add_request('other', PROMPTS[3], other)
        for event in [event for _ in range(3) for event in engine.step()]:
            other_result.take(event)
        before, after = Gathered(2), Gathered(2)
        for event in run.events[:delivered]:
            before.take(event)
        so_far = [SequenceSoFar(token_ids=tuple(tokens)) for tokens in before.tokens]
        if any(reason is not None for reason in before.reasons):
            continue
        engine.add_request('it', LONG, params, adapter=adapter, continued=so_far)
        drain(engine, {'it': after, 'other': other_result})
        assert [one + two for one, two in zip(before.tokens, after.tokens, strict=True)] == run.whole.tokens
        assert [one + two for one, two in zip(before.logprobs, after.logprobs, strict=True)] == run.whole.logprobs
        alone = run_all(make_engine(model, tokenizer), {'o': (PROMPTS[3], other, None)})
        assert other_result.logprobs == alone['o'].logprobs


def test_a_missing_end_is_reported(model, tokenizer):
    """If all tokens of a sequence were delivered but not its final event, only the final event is yielded."""
    params = SamplingParams(max_tokens=5, seed=3, ignore_eos=True)
    run = InterruptedRun(make_engine(model, tokenizer), PROMPTS[0], params, None)
    engine, after = make_engine(model, tokenizer), Gathered()
    engine.add_request('it', PROMPTS[0], params, continued=[SequenceSoFar(token_ids=tuple(run.whole.tokens[0]))])
    drain(engine, {'it': after})
    assert (after.tokens, after.texts, after.reasons) == ([[]], [''], [StopReason.LENGTH])
    assert after.spans == run.whole.spans


def test_finished_sequences_get_no_events(model, tokenizer):
    """A continued request whose sequences are all finished has no events."""
    params = SamplingParams(max_tokens=5, num_samples=2)
    engine = make_engine(model, tokenizer)
    engine.add_request('it', [5], params, continued=[SequenceSoFar(token_ids=(3,), is_finished=True)] * 2)
    assert engine.is_idle
    assert engine.step() == []


def test_abort_of_a_continued_request_reports_all_spans(model, tokenizer):
    """The final event of an aborted request has the spans of all tokens, after any number of steps."""
    params = SamplingParams(max_tokens=30, seed=3, ignore_eos=True)
    run = InterruptedRun(make_engine(model, tokenizer), LONG, params, None)
    tokens = run.whole.tokens[0][:9]
    for steps in (0, 1, 5):
        engine, after = make_engine(model, tokenizer), Gathered()
        engine.add_request('it', LONG, params, continued=[SequenceSoFar(token_ids=tuple(tokens))])
        events = [event for _ in range(steps) for event in engine.step()]
        for event in [*events, *engine.abort('it')]:
            after.take(event)
        assert after.reasons == [StopReason.ABORT]
        assert [span.end_token for span in after.spans[0]] == [len(tokens) + len(after.tokens[0])]


@pytest.mark.parametrize(
    'continued',
    [
        [SequenceSoFar()],
        [SequenceSoFar()] * 3,
        [SequenceSoFar(token_ids=(1,) * 9), SequenceSoFar()],
        [SequenceSoFar(token_ids=(320,)), SequenceSoFar()],
        [SequenceSoFar(token_ids=(5, 7, 5)), SequenceSoFar()],
    ],
)
def test_impossible_continuations_are_refused(model, tokenizer, continued):
    """A wrong number of entries, too many or unknown tokens, or tokens after a stop raise InvalidContinuation."""
    engine = make_engine(model, tokenizer)
    with pytest.raises(InvalidContinuation):
        engine.add_request('it', [5], SamplingParams(max_tokens=8, num_samples=2, stop=[7]), continued=continued)
    assert engine.is_idle


def test_structured_output_is_refused(model, tokenizer):
    """The torch engine refuses structured output instead of ignoring it."""
    params = SamplingParams(max_tokens=8, structured_output=StructuredOutput(choices=('a', 'b')))
    with pytest.raises(NotSupportedByEngine):
        make_engine(model, tokenizer).add_request('it', [5], params)
