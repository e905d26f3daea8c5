"""Incremental conversion of tokens to text that never splits a character."""

from collections.abc import Sequence
from typing import Protocol

_INCOMPLETE = '\ufffd'


class TokenDecoder(Protocol):
    """The part of `tokenizers.Tokenizer` that is used here."""

    def decode(self, ids: Sequence[int], /, *, skip_special_tokens: bool) -> str:
        """Return the text of `ids`."""
        ...


class IncrementalDetokenizer:
    """Converts a growing list of tokens to pieces of text that add up to the text of the complete list.

    A byte-level token may end inside a UTF-8 character. Such an end decodes to U+FFFD and is withheld until a later
    token completes the character. Some decoders strip a leading space, so each piece is computed as the difference of
    two decodings that start at an earlier piece.
    """

    def __init__(self, decoder: TokenDecoder) -> None:
        self._decoder = decoder
        self._window: list[int] = []
        self._context_tokens = 0
        self._emitted = ''

    def push(self, token_id: int) -> str:
        """Add a token and return the new text, which may be empty."""
        self._window.append(token_id)
        text = self._decode(self._window)
        is_complete = not text.endswith(_INCOMPLETE)
        complete = text if is_complete else text[:-1]
        piece = complete[len(self._emitted) :]
        self._emitted += piece
        if piece and is_complete:
            self._slide()
        return piece

    def flush(self) -> str:
        """Return the withheld text."""
        piece = self._decode(self._window)[len(self._emitted) :]
        self._emitted += piece
        return piece

    def _slide(self) -> None:
        """Keep only the tokens of the last piece as context for the next piece."""
        self._window = self._window[self._context_tokens :]
        self._context_tokens = len(self._window)
        self._emitted = self._decode(self._window)

    def _decode(self, ids: list[int]) -> str:
        return self._decoder.decode(ids, skip_special_tokens=True)
