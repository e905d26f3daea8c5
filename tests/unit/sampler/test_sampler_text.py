"""Unit tests of incremental detokenization and stop rules."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from twinkle.data_format import SamplingParams, StopReason
from twinkle.sampler.engine.detokenize import IncrementalDetokenizer
from twinkle.sampler.engine.stopping import StopDetector, StopRules

EOS = 256


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token per byte and a special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: index for index, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(['<end>'])
    return tokenizer


def metaspace_tokenizer() -> Tokenizer:
    """Return a tokenizer whose decoder strips the space of the first word."""
    words = {'▁Hello': 0, '▁world': 1, '!': 2, '▁': 3}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token='!'))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(['<end>'])
    return tokenizer


TOKENIZER = byte_tokenizer()
ORDINARY, LEADING, CONTINUATION = (TOKENIZER.token_to_id(symbol) for symbol in 'aÃĢ')
"""Tokens of the bytes 0x61, 0xC3 and 0x80."""


class CountingDecoder:
    """Decodes with the tokenizer, and counts the tokens of all calls."""

    def __init__(self):
        self.count = 0

    def decode(self, ids: Sequence[int], /, *, skip_special_tokens: bool) -> str:
        """Return the text of `ids`."""
        self.count += len(ids)
        return TOKENIZER.decode(ids, skip_special_tokens=skip_special_tokens)


def detector(max_tokens: int = 100, eos: int = EOS, **params) -> StopDetector:
    """Return the stop detector of a sequence."""
    rules = StopRules.of(SamplingParams(**params), eos_token_ids=frozenset({eos}), max_new_tokens=max_tokens)
    return StopDetector(rules, IncrementalDetokenizer(TOKENIZER))


def feed(detector: StopDetector, text: str, *more: int) -> tuple[list[str], StopReason | None, int]:
    """Push the bytes of `text` and the tokens `more`; return the pieces, the reason and the number of tokens."""
    pieces = []
    for count, token in enumerate([*TOKENIZER.encode(text).ids, *more], start=1):
        decision = detector.push(token)
        pieces.append(decision.text)
        if decision.reason:
            return pieces, decision.reason, count
    return pieces, None, len(pieces)


@given(text=st.text(max_size=40))
def test_pieces_add_up_and_never_split_a_character(text):
    """The pieces of text add up to the text of all tokens, and no piece ends inside a character."""
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    pieces = [detokenizer.push(token) for token in TOKENIZER.encode(text).ids]
    assert ''.join(pieces) + detokenizer.flush() == text
    assert '\ufffd' in text or not any('\ufffd' in piece for piece in pieces)


@given(ids=st.lists(st.integers(0, 256), max_size=60))
def test_pieces_of_any_bytes_add_up(ids):
    """Bytes that are not valid text give the same result token by token and in a single call."""
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    pieces = [detokenizer.push(token) for token in ids]
    assert ''.join(pieces) + detokenizer.flush() == TOKENIZER.decode(ids)


@pytest.mark.parametrize('token', [EOS, 300, CONTINUATION, LEADING, ORDINARY])
@pytest.mark.parametrize('begin', [(), (ORDINARY,), (ORDINARY, LEADING)])
def test_cost_of_a_token_is_bounded(begin, token):
    """The number of tokens decoded per pushed token stays bounded, even for tokens without text or invalid bytes."""
    decoder, ids = CountingDecoder(), [*begin, *[token] * 2000]
    detokenizer = IncrementalDetokenizer(decoder)
    pieces = [detokenizer.push(token_id) for token_id in ids]
    assert ''.join(pieces) + detokenizer.flush() == TOKENIZER.decode(ids)
    assert decoder.count <= 40 * len(ids)


@given(begin=st.integers(0, 3), ids=st.lists(st.sampled_from([EOS, 300]), max_size=20))
def test_tokens_without_text_change_no_spaces(begin, ids):
    """Special and unknown tokens before a word do not change the space between words."""
    tokenizer = metaspace_tokenizer()
    special = tokenizer.token_to_id('<end>')
    ids = [begin, *(special if token_id == EOS else token_id for token_id in ids), 1, 3, special, 0]
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert ''.join(detokenizer.push(token) for token in ids) + detokenizer.flush() == tokenizer.decode(ids)


@given(ids=st.lists(st.integers(0, 2), max_size=12))
def test_spaces_between_words_are_kept(ids):
    """A decoder that strips leading spaces strips only the space at the beginning of the text."""
    tokenizer = metaspace_tokenizer()
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert ''.join(detokenizer.push(token) for token in ids) + detokenizer.flush() == tokenizer.decode(ids)


def test_end_of_sequence_ends_without_text():
    """The end-of-sequence token ends the sequence and has no text."""
    assert feed(detector(), 'ok', EOS) == (['o', 'k', ''], StopReason.STOP, 3)


def test_end_of_sequence_is_ignored_on_request():
    """The end-of-sequence token does not end a sequence with `ignore_eos`."""
    assert feed(detector(ignore_eos=True), 'ok', EOS)[1] is None


def test_stop_token_id_ends_without_text():
    """An ordinary token in `stop` ends the sequence, and its text is omitted."""
    stop = TOKENIZER.encode('x').ids[0]
    assert feed(detector(stop=[stop]), 'abxcd') == (['a', 'b', ''], StopReason.STOP, 3)


def test_stop_string_across_tokens_is_removed():
    """A stop string that spans several tokens is removed, and no part of it is reported."""
    assert feed(detector(stop='END'), 'go ENENDx') == (['g', 'o', ' ', '', '', 'EN', '', ''], StopReason.STOP, 8)


def test_partial_stop_string_is_released():
    """Text that starts like a stop string is reported once it cannot become a stop string."""
    pieces, reason, _ = feed(detector(stop=['abcd', 'cx']), 'abce')
    assert (''.join(pieces), reason) == ('abce', None)


def test_earliest_of_several_stop_strings_is_used():
    """If several stop strings end with the same token, the text ends before the stop string that begins first."""
    pieces, reason, _ = feed(detector(stop=['bcd', 'cd']), 'abcd')
    assert (''.join(pieces), reason) == ('a', StopReason.STOP)


def test_limit_releases_withheld_text():
    """The withheld text and incomplete characters are reported when the sequence ends at max_tokens."""
    assert feed(detector(3, stop='cd'), 'abc') == (['a', 'b', 'c'], StopReason.LENGTH, 3)
    assert feed(detector(1), 'é') == (['\ufffd'], StopReason.LENGTH, 1)


def test_stops_count_only_after_min_tokens():
    """A stop within the first min_tokens tokens is ignored; a later stop ends the sequence."""
    pieces, reason, count = feed(detector(stop='b', min_tokens=2), 'abab')
    assert (''.join(pieces), reason, count) == ('aba', StopReason.STOP, 4)
    rules = StopRules.of(SamplingParams(min_tokens=2), eos_token_ids=frozenset({EOS}), max_new_tokens=9)
    assert rules.forbidden_tokens(1) == {EOS}
    assert not rules.forbidden_tokens(2)


@given(
    text=st.text(alphabet='ab', max_size=30),
    stops=st.lists(st.text('ab', min_size=1, max_size=9), min_size=1, max_size=6),
)
def test_longest_start_of_a_stop_string_is_withheld(text, stops):
    """The withheld text is the longest suffix that begins a stop string and is shorter than the longest stop string."""
    pieces, _, _ = feed(detector(stop=stops, min_tokens=100, max_tokens=200), text)
    lengths = range(min(max(map(len, stops)) - 1, len(text)), 0, -1)
    withheld = next((length for length in lengths if any(stop.startswith(text[-length:]) for stop in stops)), 0)
    assert ''.join(pieces) == text[: len(text) - withheld]


@given(text=st.text(alphabet='abc', max_size=30), stops=st.lists(st.text('abc', min_size=1, max_size=4), max_size=3))
def test_text_ends_before_the_first_stop_string(text, stops):
    """The reported text ends before the stop string that is completed first."""
    pieces, reason, count = feed(detector(stop=stops), text)
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if not ends:
        assert reason is None
        return
    assert reason is StopReason.STOP
    assert count == min(ends)
    begins = [count - len(stop) for stop in stops if text[:count].endswith(stop)]
    assert ''.join(pieces) == text[: min(begins)]
