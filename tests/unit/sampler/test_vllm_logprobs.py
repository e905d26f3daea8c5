"""Unit tests of the conversion of vLLM's log-probabilities: the sampled token, then the most likely tokens."""

import pytest
from vllm.logprobs import FlatLogprobs, append_logprobs_for_next_position

from twinkle.sampler.vllm.sampling import top_tokens

BEST = [(7, -0.5), (8, -1.0), (9, -2.5)]


def flat(own: tuple[int, float], rank: int, *, is_joined: bool) -> FlatLogprobs:
    """Return one position in vLLM's format; with `is_joined`, in the form of two merged outputs."""
    entry, joined = FlatLogprobs(), FlatLogprobs()
    tokens, values = zip(own, *BEST, strict=True)
    append_logprobs_for_next_position(entry, list(tokens), list(values), [None] * 4, rank, len(BEST))
    joined.extend(entry)
    return joined if is_joined else entry


@pytest.mark.parametrize('is_joined', [False, True])
@pytest.mark.parametrize(
    ('own', 'rank'), [((7, -0.5), 1), ((8, -1.0), 2), ((9, -2.5), 3), ((5, -3.0), 4), ((6, -9.0), 40)]
)
def test_entry_is_the_same_for_merged_outputs(own, rank, is_joined):
    """The sampled token is first, and is repeated if it is among the most likely tokens, even in merged outputs."""
    assert top_tokens(flat(own, rank, is_joined=is_joined), 0, count=3) == [own, *BEST]


@pytest.mark.parametrize('is_joined', [False, True])
def test_entry_without_top_tokens_has_only_the_sampled_token(is_joined):
    """An entry without requested top tokens has only the sampled token."""
    entry = FlatLogprobs()
    append_logprobs_for_next_position(entry, [8], [-1.0], [None], 2, 0)
    joined = FlatLogprobs()
    joined.extend(entry)
    assert top_tokens(joined if is_joined else entry, 0, count=0) == [(8, -1.0)]
