"""Token names are converted to bytes for both kinds of vocabularies."""

from pathlib import Path

from tokenizers import decoders

from fixtures.tiny_model import build_tiny_tokenizer
from twinkle.template import ChatTokenizer
from twinkle.template.token_bytes import TokenAlphabet


def test_token_bytes_concatenate_to_the_text(tmp_path: Path) -> None:
    """The joined bytes of all tokens equal the text, including multi-byte characters and special tokens."""
    tokenizer = ChatTokenizer(build_tiny_tokenizer(tmp_path))
    text = 'héllo\n\x7f wörld ✓🙂<|im_end|>'
    token_ids = tokenizer.encode(text)
    assert b''.join(map(tokenizer.token_bytes, token_ids)).decode() == text
    assert [tokenizer.is_special(token_id) for token_id in token_ids[-2:]] == [False, True]


def test_an_id_without_a_token_has_no_bytes(tmp_path: Path) -> None:
    """Ids that only pad the vocabulary give empty bytes."""
    assert ChatTokenizer(build_tiny_tokenizer(tmp_path)).token_bytes(319) == b''


def test_text_names_are_converted() -> None:
    """U+2581 is a space and `<0xE2>` is one byte in vocabularies whose names are text."""
    decoder = decoders.Sequence([decoders.Replace('\u2581', ' '), decoders.ByteFallback(), decoders.Fuse()])
    alphabet = TokenAlphabet.of_decoder(decoder)
    assert [alphabet.to_bytes(name) for name in ('\u2581The', '<0xE2>', 'é')] == [b' The', b'\xe2', 'é'.encode()]
