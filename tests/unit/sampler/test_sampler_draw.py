"""Unit tests of how a token is sampled: repeatability, distribution, filters and penalties."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from twinkle.data_format import SamplingParams
from twinkle.sampler.engine.token_sampling import sample_token, top_logprobs, uniform

LOGITS = torch.tensor([2.0, 1.0, 0.5, -1.0, 0.5, -3.0])


def draw(number: float, logits: torch.Tensor = LOGITS, *, present=(), forbidden=(), sampled=(), **params) -> int:
    """Sample a token with the given parameters."""
    given_params = SamplingParams(**params)
    return sample_token(logits, given_params, present=present, forbidden=forbidden, number=number, sampled_ids=sampled)


def drawn_tokens(**params) -> set[int]:
    """Return all tokens that can be sampled."""
    return {draw(step / 1000, **params) for step in range(1000)}


def test_uniform_depends_on_each_of_seed_sequence_and_token():
    """The same arguments give the same number, and different arguments give different numbers from 0 to 1."""
    numbers = {uniform(seed, index, position) for seed in range(5) for index in range(5) for position in range(20)}
    assert len(numbers) == 500
    assert all(0.0 <= number < 1.0 for number in numbers)
    assert abs(sum(numbers) / 500 - 0.5) < 0.05
    assert uniform(-3, 1, 2) == uniform(-3, 1, 2)


def test_frequencies_follow_the_distribution():
    """Evenly spaced numbers give each token its fraction of the probability."""
    counts = torch.zeros(6)
    for step in range(5000):
        counts[draw((step + 0.5) / 5000, temperature=0.7)] += 1
    assert torch.allclose(counts / 5000, torch.softmax(LOGITS / 0.7, 0), atol=2e-3)


def test_zero_temperature_takes_the_most_likely():
    """Temperature 0 gives the most likely token for every random number."""
    assert {draw(number, temperature=0.0) for number in (0.0, 0.5, 0.999)} == {0}


@pytest.mark.parametrize('tiny', [5e-324, 1e-320, 1e-300])
def test_smallest_valid_parameters_are_stable(tiny: float):
    """The smallest temperature is greedy, and the smallest penalty repeats tokens, without division by zero."""
    assert drawn_tokens(temperature=tiny) == {0}
    assert drawn_tokens(top_p=tiny) == {0}
    assert drawn_tokens(repetition_penalty=tiny, present=(1,)) == {1}
    assert drawn_tokens(repetition_penalty=tiny, present=(1,), temperature=tiny) == {1}
    assert 0 not in drawn_tokens(repetition_penalty=1e308, present=(3,), forbidden=(0,))


def test_top_k_keeps_exactly_k_even_with_ties():
    """Tokens 2 and 4 tie for third place, and the token with the lower id is kept."""
    assert drawn_tokens(top_k=3) == {0, 1, 2}
    assert drawn_tokens(top_k=1) == {0}


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    """The most likely tokens are kept until their total probability reaches `top_p`."""
    probs = torch.softmax(LOGITS, 0)
    assert drawn_tokens(top_p=float(probs[0]) - 1e-3) == {0}
    assert drawn_tokens(top_p=float(probs[0]) + 1e-3) == {0, 1}
    assert drawn_tokens(top_p=1.0) == {0, 1, 2, 3, 4, 5}


@given(logits=st.lists(st.floats(-20, 20, width=32), min_size=2, max_size=40), top_p=st.floats(0.01, 0.999))
def test_top_p_equals_a_full_sort(logits, top_p):
    """Unlikely tokens can be dropped before sorting without a change of the kept tokens."""
    row = torch.tensor(logits)
    probs, order = torch.softmax(row.double(), 0).sort(descending=True, stable=True)
    size = int(torch.searchsorted(probs.cumsum(0), top_p)) + 1
    allowed = set(order[:size].tolist())
    assert {draw(step / 50, row, top_p=top_p) for step in range(50)} <= allowed
    assert draw(1 - 2**-53, row, top_p=top_p) in allowed


def test_top_p_applies_after_top_k():
    """Probabilities are renormalized after top_k and before top_p."""
    first_of_two = math.exp(2) / (math.exp(2) + math.exp(1))
    assert drawn_tokens(top_k=2, top_p=first_of_two - 1e-3) == {0}
    assert drawn_tokens(top_k=2, top_p=first_of_two + 1e-3) == {0, 1}


def test_repetition_penalty_reduces_present_tokens():
    """The penalty divides positive logits and multiplies negative logits; the given logits are not modified."""
    before = LOGITS.clone()
    assert draw(0.0, present=[0, 0], temperature=0.0, repetition_penalty=4.0) == 1
    assert draw(0.0, torch.tensor([-1.0, -1.5]), present=[0], temperature=0.0, repetition_penalty=2.0) == 1
    assert torch.equal(before, LOGITS)


def test_forbidden_tokens_are_never_drawn():
    """A forbidden token is never sampled, even if it is the most likely one."""
    assert draw(0.0, forbidden=[0], temperature=0.0) == 1
    assert drawn_tokens(forbidden=[0, 3]) == {1, 2, 4, 5}


def test_top_logprobs_begin_with_the_drawn_token():
    """The sampled token is first, followed by the most likely tokens, each with its log-probability."""
    logprobs = LOGITS.log_softmax(0)
    own, *best = top_logprobs(logprobs, 5, 2)
    assert own == (5, float(logprobs[5]))
    assert [token for token, _ in best] == [0, 1]
    assert top_logprobs(logprobs, 5, 0) == [own]


def test_min_p_is_relative_to_the_most_likely_token():
    """Tokens below the threshold are never sampled, and the others keep their proportions."""
    probs = torch.softmax(LOGITS, 0)
    share = float(probs[2] / probs[0])
    assert drawn_tokens(min_p=share * 0.99) == {0, 1, 2, 4}
    assert drawn_tokens(min_p=share * 1.01) == {0, 1}
    assert drawn_tokens(min_p=1.0) == {0}
    # The probabilities are renormalized between min_p and top_p.
    assert drawn_tokens(min_p=share * 1.01, top_p=float(probs[0] / (probs[0] + probs[1])) - 1e-3) == {0}


def test_penalties_count_the_new_tokens():
    """The presence penalty is subtracted once, the frequency penalty per occurrence; the prompt does not count."""
    assert draw(0.0, temperature=0.0, present=(0, 0), presence_penalty=2.0, frequency_penalty=2.0) == 0
    assert draw(0.0, temperature=0.0, sampled=(0,), presence_penalty=0.9) == 0
    assert draw(0.0, temperature=0.0, sampled=(0,), presence_penalty=1.1) == 1
    assert draw(0.0, temperature=0.0, sampled=(0,), frequency_penalty=0.6) == 0
    assert draw(0.0, temperature=0.0, sampled=(0, 0), frequency_penalty=0.6) == 1
    assert draw(0.0, temperature=0.0, sampled=(3,), frequency_penalty=-2.0, presence_penalty=-2.0) == 3


@given(
    sampled=st.lists(st.integers(0, 5), max_size=8),
    presence=st.floats(-2, 2, width=32),
    frequency=st.floats(-2, 2, width=32),
)
def test_penalties_equal_their_definition(sampled, presence, frequency):
    """The sampled token equals that of logits which are penalized one token at a time."""
    changed = LOGITS.clone()
    for token in set(sampled):
        changed[token] -= frequency * sampled.count(token) + presence
    for number in (0.1, 0.5, 0.9):
        got = draw(number, sampled=sampled, presence_penalty=presence, frequency_penalty=frequency)
        assert got == draw(number, changed)


def test_given_logits_are_not_changed():
    """Penalties do not modify the given logits."""
    before = LOGITS.clone()
    draw(0.5, sampled=(0, 1), present=(0,), forbidden=(2,), repetition_penalty=1.5, frequency_penalty=1.0, min_p=0.1)
    draw(0.5, sampled=(0, 1), presence_penalty=1.0)
    assert torch.equal(LOGITS, before)
