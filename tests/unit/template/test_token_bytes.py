"""What a token's name stands for, in the two alphabets that vocabularies are written in."""

from pathlib import Path

from tokenizers import decoders

from fixtures.tiny_model import build_tiny_tokenizer
from twinkle.template import ChatTokenizer
from twinkle.template.token_bytes import TokenAlphabet


def test_bytes_of_a_texts_tokens_are_the_text(tmp_path: Path) -> None:
    """Joined, they are the text, characters of many bytes and special tokens included."""
    tokenizer = ChatTokenizer(build_tiny_tokenizer(tmp_path))
    text = 'héllo\n\x7f wörld ✓🙂<|im_end|>'
    token_ids = tokenizer.encode(text)
    assert b''.join(map(tokenizer.token_bytes, token_ids)).decode() == text
    assert [tokenizer.is_special(token_id) for token_id in token_ids[-2:]] == [False, True]


def test_id_without_a_token_stands_for_nothing(tmp_path: Path) -> None:
    """A vocabulary that is padded has ids without names."""
    assert ChatTokenizer(build_tiny_tokenizer(tmp_path)).token_bytes(319) == b''


def test_names_with_marks_and_byte_names_are_read() -> None:
    """Where names are text, the mark is a space and a byte's name is that byte."""
    decoder = decoders.Sequence([decoders.Replace('\u2581', ' '), decoders.ByteFallback(), decoders.Fuse()])
    alphabet = TokenAlphabet.of_decoder(decoder)
    assert [alphabet.to_bytes(name) for name in ('\u2581The', '<0xE2>', 'é')] == [b' The', b'\xe2', 'é'.encode()]
