"""What vLLM reports of each position, in our form: the token itself, then the most likely ones, that one among them."""

import pytest
from vllm.logprobs import FlatLogprobs, append_logprobs_for_next_position

from twinkle.sampler.vllm.sampling import top_tokens

BEST = [(7, -0.5), (8, -1.0), (9, -2.5)]


def flat(own: tuple[int, float], rank: int, *, is_joined: bool) -> FlatLogprobs:
    """Return one position as vLLM sends it, or as it leaves it where two outputs waited for their reader."""
    entry, joined = FlatLogprobs(), FlatLogprobs()
    tokens, values = zip(own, *BEST, strict=True)
    append_logprobs_for_next_position(entry, list(tokens), list(values), [None] * 4, rank, len(BEST))
    joined.extend(entry)
    return joined if is_joined else entry


@pytest.mark.parametrize('is_joined', [False, True])
@pytest.mark.parametrize(
    ('own', 'rank'), [((7, -0.5), 1), ((8, -1.0), 2), ((9, -2.5), 3), ((5, -3.0), 4), ((6, -9.0), 40)]
)
def test_entry_is_the_same_however_vllm_joined_it(own, rank, is_joined):
    """A drawn token that is one of the most likely is told in both places."""
    assert top_tokens(flat(own, rank, is_joined=is_joined), 0, count=3) == [own, *BEST]


@pytest.mark.parametrize('is_joined', [False, True])
def test_token_alone_stays_alone(is_joined):
    """Where no others are asked for there is one pair."""
    entry = FlatLogprobs()
    append_logprobs_for_next_position(entry, [8], [-1.0], [None], 2, 0)
    joined = FlatLogprobs()
    joined.extend(entry)
    assert top_tokens(joined if is_joined else entry, 0, count=0) == [(8, -1.0)]
