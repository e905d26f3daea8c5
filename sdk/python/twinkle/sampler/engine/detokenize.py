"""Incremental conversion of tokens to text that never splits a character."""

from collections.abc import Sequence
from typing import Protocol

_INCOMPLETE = '\ufffd'
_MAX_PENDING = 16
"""Maximum number of tokens after the context, before older tokens are dropped."""
_KEPT = 8
"""Number of tokens that are kept then. A UTF-8 character has at most 4 bytes, so all text but its end is final."""


class TokenDecoder(Protocol):
    """The part of `tokenizers.Tokenizer` that is used here."""

    def decode(self, ids: Sequence[int], /, *, skip_special_tokens: bool) -> str:
        """Return the text of `ids`."""
        ...


class IncrementalDetokenizer:
    """Converts a growing list of tokens to pieces of text that add up to the text of the complete list.

    A byte-level token may end inside a UTF-8 character. Such an end decodes to U+FFFD and is withheld until a later
    token completes the character. Some decoders strip a leading space, so each piece is computed as the difference of
    two decodings that start at an earlier piece. Each decoding has a bounded number of tokens, also if tokens have no
    text or are not valid UTF-8.
    """

    def __init__(self, decoder: TokenDecoder) -> None:
        self._decoder = decoder
        self._window: list[int] = []
        self._context_tokens = 0
        self._text = ''
        self._emitted = ''

    def push(self, token_id: int) -> str:
        """Add a token and return the new text, which may be empty."""
        text = self._decode([*self._window, token_id])
        if text == self._text and self._is_blank(token_id):
            return ''
        self._window.append(token_id)
        self._text = text
        complete = _complete(text)
        piece = complete[len(self._emitted) :]
        self._emitted += piece
        if piece and complete == text:
            self._slide()
        elif len(self._window) - self._context_tokens > _MAX_PENDING:
            self._drop_final()
        return piece

    def flush(self) -> str:
        """Return the withheld text."""
        piece = self._text[len(self._emitted) :]
        self._emitted += piece
        return piece

    def _slide(self) -> None:
        """Keep only the tokens of the last piece as context for the next piece."""
        self._window = self._window[self._context_tokens :]
        self._context_tokens = len(self._window)
        self._text = self._emitted = self._decode(self._window)

    def _drop_final(self) -> None:
        """Keep only the last tokens. The end of their text is incomplete, or they have no new text."""
        self._window = self._window[-_KEPT:]
        self._context_tokens = 0
        self._text = self._decode(self._window)
        self._emitted = _complete(self._text)

    def _is_blank(self, token_id: int) -> bool:
        """Return whether a token has no text in any position, such as a special token.

        A token that is only a stripped leading space has text if it is repeated.
        """
        return not self._decode([token_id, token_id])

    def _decode(self, ids: list[int]) -> str:
        return self._decoder.decode(ids, skip_special_tokens=True)


def _complete(text: str) -> str:
    """Return `text` without an incomplete character at its end."""
    return text.removesuffix(_INCOMPLETE)
