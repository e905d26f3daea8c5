"""Incremental conversion of tokens to text that never splits a character."""

from collections.abc import Sequence
from typing import Protocol

_REPLACEMENT = '\ufffd'
_MAX_PENDING = 16
"""Maximum number of tokens after the context. With more tokens, those between the first and the last are dropped."""
_KEPT = 4
"""Number of tokens that are then kept at the beginning, and at the end. A UTF-8 character has at most 4 bytes, so the
first tokens determine whether their bytes are valid, and the last ones contain every character that may become
complete."""


class TokenDecoder(Protocol):
    """The part of `tokenizers.Tokenizer` that is used here."""

    def decode(self, ids: Sequence[int], /, *, skip_special_tokens: bool) -> str:
        """Return the text of `ids`."""
        ...


class IncrementalDetokenizer:
    """Converts a growing list of tokens to pieces of text that add up to the text of the complete list.

    A token may end inside a UTF-8 character. Its bytes decode to U+FFFD, once per character or, for byte-fallback
    tokens, once per byte, and are withheld until a later token completes the character. Some decoders strip a leading
    space, so each piece is computed as the difference of two decodings that start at an earlier piece. Each decoding
    has a bounded number of tokens, even if tokens have no text or are not valid UTF-8.

    Byte-fallback decoders replace all bytes of a run if one of them is invalid. Characters that were complete before
    the invalid byte have been returned, so only the remaining bytes of the run become U+FFFD here.
    """

    def __init__(self, decoder: TokenDecoder) -> None:
        self._decoder = decoder
        self._window: list[int] = []
        self._context_tokens = 0
        self._context_text = ''
        self._text = ''
        self._emitted = 0

    def push(self, token_id: int) -> str:
        """Add a token and return the new text, which may be empty."""
        text = self._decode_window([*self._window, token_id])
        if text == self._text and self._is_blank(token_id):
            return ''
        self._window.append(token_id)
        self._text = text
        complete = text.rstrip(_REPLACEMENT)
        if len(complete) == len(text) > self._emitted:
            piece = self._emit(len(text))
            self._slide()
            return piece
        if len(self._window) - self._context_tokens > _MAX_PENDING:
            return self._drop_middle()
        return self._emit(len(complete))

    def flush(self) -> str:
        """Return the withheld text."""
        return self._emit(len(self._text))

    def _emit(self, end: int) -> str:
        """Return the text before `end` that was not returned before."""
        piece = self._text[self._emitted : end]
        self._emitted = max(self._emitted, end)
        return piece

    def _slide(self) -> None:
        """Keep only the tokens of the last piece as context for the next piece."""
        self._window = self._window[self._context_tokens :]
        self._context_tokens = len(self._window)
        self._text = self._context_text = self._decode(self._window)
        self._emitted = len(self._text)

    def _drop_middle(self) -> str:
        """Return the text that can no longer change, and keep only the first and last tokens after the context."""
        piece = self._emit(_final_length(self._text))
        pending = self._window[self._context_tokens :]
        self._window = pending[:_KEPT] + pending[-_KEPT:]
        self._context_tokens, self._context_text = 0, ''
        self._text = self._decode(self._window)
        self._emitted = _final_length(self._text)
        return piece

    def _is_blank(self, token_id: int) -> bool:
        """Return whether a token has no text in any position, such as a special token.

        A token that is only a stripped leading space has text if it is repeated.
        """
        return not self._decode([token_id, token_id])

    def _decode_window(self, window: list[int]) -> str:
        """Return the text of the context, which was returned before, and of the tokens after it."""
        text = self._decode(window)
        if text.startswith(self._context_text):
            return text
        return self._context_text + self._decode(window[self._context_tokens :])

    def _decode(self, ids: list[int]) -> str:
        return self._decoder.decode(ids, skip_special_tokens=True)


def _final_length(text: str) -> int:
    """Return the length of `text` without the last U+FFFD, which a later token may complete."""
    return len(text.removesuffix(_REPLACEMENT))
