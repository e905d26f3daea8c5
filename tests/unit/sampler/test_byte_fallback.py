"""Incremental detokenization with the tokens of a byte-fallback tokenizer, such as those of Llama 2."""

from collections.abc import Sequence
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers

from twinkle.data_format import SamplingParams, StopReason
from twinkle.sampler.engine.detokenize import IncrementalDetokenizer
from twinkle.sampler.engine.stopping import StopDetector, StopRules

WORDS = ('<unk>', '</s>', '▁', 'a', 'b', 'é', '中', '.', '▁a', 'ab')
FIRST_BYTE = len(WORDS)
"""Token of the byte 0; the tokens of the other bytes follow in order."""
CHARACTERS = 'ab é中.\n国字漢語한글🙂👩‍👩‍👧🇩🇪e\u0301n\u0303\u0e01\u0e33\u200d\ufe0f'
"""Letters of the vocabulary, and others that consist of two to four byte tokens or of several code points."""


def byte_fallback_tokenizer() -> Tokenizer:
    """Return a tokenizer that encodes characters outside its vocabulary as one token per byte."""
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    vocabulary |= {f'<0x{value:02X}>': FIRST_BYTE + value for value in range(256)}
    merges = [('▁', 'a'), ('a', 'b')]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token='<unk>', fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend('▁'), normalizers.Replace(' ', '▁')])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(' ', 1, 0)]
    )
    tokenizer.add_special_tokens(['</s>'])
    return tokenizer


TOKENIZER = byte_fallback_tokenizer()
texts = st.text(st.sampled_from(CHARACTERS), min_size=1, max_size=40)
texts_with_replacements = st.text(st.sampled_from(CHARACTERS + '\ufffd'), max_size=40)


class CountingDecoder:
    """Decodes with the tokenizer, and counts the tokens of all calls."""

    def __init__(self):
        self.count = 0

    def decode(self, ids: Sequence[int], /, *, skip_special_tokens: bool) -> str:
        """Return the text of `ids`."""
        self.count += len(ids)
        return TOKENIZER.decode(ids, skip_special_tokens=skip_special_tokens)


def byte_ids(data: bytes) -> list[int]:
    """Return the byte tokens of `data`."""
    return [FIRST_BYTE + value for value in data]


def stream(ids: Sequence[int]) -> list[str]:
    """Return the piece of each token, and the rest at the end of the stream."""
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


def valid_length(data: bytes) -> int:
    """Return the number of bytes before the first byte that is invalid or belongs to an incomplete character."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.start
    return len(data)


def replaced(ids: Sequence[int]) -> str:
    """Return the text of `ids`; in each run of bytes, every byte after the complete characters is replaced."""
    known: list[int] = []
    for is_byte, group in groupby(ids, key=lambda token: token >= FIRST_BYTE):
        run = list(group)
        if is_byte:
            data = bytes(token - FIRST_BYTE for token in run)
            length = valid_length(data)
            text = data[:length].decode() + '\ufffd' * (len(data) - length)
            run = byte_ids(text.encode())
        known += run
    return TOKENIZER.decode(known)


@given(text=texts_with_replacements)
def test_pieces_are_whole_characters(text):
    """The pieces add up to the text, and a piece is never the replacement of an incomplete character."""
    ids = TOKENIZER.encode(text).ids
    pieces = stream(ids)
    assert ''.join(pieces) == TOKENIZER.decode(ids) == text
    assert '\ufffd' in text or not any('\ufffd' in piece for piece in pieces)


def test_a_character_is_returned_with_its_last_byte():
    """The bytes of an emoji are withheld until the last one, and each character of a run is returned at once."""
    assert stream(TOKENIZER.encode('a🙂漢').ids) == ['a', '', '', '', '🙂', '', '', '漢', '']


@given(start=st.sampled_from(WORDS[2:]), data=st.binary(max_size=60), end=st.sampled_from(['', 'a', '中']))
def test_bytes_that_begin_invalid_equal_one_decoding(start, data, end):
    """A run of bytes whose first byte is invalid gives the same text token by token and in one decoding."""
    ids = [TOKENIZER.token_to_id(start), *byte_ids(b'\xff' + data)]
    ids += [TOKENIZER.token_to_id(end)] if end else []
    assert ''.join(stream(ids)) == TOKENIZER.decode(ids)


@given(ids=st.lists(st.integers(1, FIRST_BYTE - 1) | st.integers(FIRST_BYTE, FIRST_BYTE + 255), max_size=60))
def test_complete_characters_are_kept_before_invalid_bytes(ids):
    """Complete characters stay as they were returned, and each later byte of an invalid run is replaced once."""
    ids = [token for token in ids if token != TOKENIZER.token_to_id('</s>')]
    assert ''.join(stream(ids)) == replaced(ids)


@given(parts=st.lists(texts.map(str.encode) | st.binary(min_size=1, max_size=8), max_size=8))
def test_text_between_invalid_bytes_is_kept(parts):
    """Characters and invalid bytes in any order give one replacement for each byte that is not part of a character."""
    ids = [token for part in parts for token in (*byte_ids(part), TOKENIZER.token_to_id('a'))]
    assert ''.join(stream(ids)) == replaced(ids)


def test_an_incomplete_end_is_returned_by_flush():
    """Bytes of a character that the stream does not complete are replaced at the end of the stream."""
    ids = [TOKENIZER.token_to_id('a'), *byte_ids('中'.encode()), *byte_ids('国'.encode()[:2])]
    assert stream(ids)[-1] == '\ufffd\ufffd'


@pytest.mark.parametrize(
    'data', ['\n漢語🙂'.encode(), b'\xff', b'\xe4\xb8', '漢'.encode() + b'\xff', b'\x80' + '漢語'.encode()]
)
def test_cost_of_a_byte_is_bounded(data):
    """Long runs of valid and of invalid bytes cost a bounded number of decoded tokens per token."""
    decoder, ids = CountingDecoder(), byte_ids(data * (2000 // len(data)))
    detokenizer = IncrementalDetokenizer(decoder)
    text = ''.join(detokenizer.push(token) for token in ids) + detokenizer.flush()
    assert text == replaced(ids)
    assert decoder.count <= 60 * len(ids)


@given(before=texts, stop=texts, after=texts)
def test_stop_strings_are_found(before, stop, after):
    """The text ends before the first stop string, also if its characters consist of several tokens."""
    rules = StopRules.of(SamplingParams(stop=stop), eos_token_ids=frozenset(), max_new_tokens=1000)
    detector = StopDetector(rules, IncrementalDetokenizer(TOKENIZER))
    text = before + stop + after
    result, reason = '', None
    for token in TOKENIZER.encode(text).ids:
        decision = detector.push(token)
        result, reason = result + decision.text, decision.reason
        if reason is not None:
            break
    assert (result, reason) == (text[: text.find(stop)], StopReason.STOP)
