"""A lower bound on the number of tokens in a text, from its length in bytes and the longest token.

The bound is valid only if each byte of the text becomes a part of a token, except bytes that the vocabulary lacks. In
addition, no token may cover more text than its own length. Both conditions hold for byte-level BPE if its other
settings remove no text. In all other cases the bound is 0.
"""

import json
from functools import cached_property
from typing import Any

import tokenizers

from twinkle.template.token_bytes import BYTE_LEVEL

_PLAIN_NORMALIZERS = {'NFC'}
"""Normalizers whose result for a whole text is at most as long as the results for its parts together."""


class TokenBound:
    """The lower bound for one tokenizer; the tokenizer is inspected on first use.

    Concurrency: safe to share between threads.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def _rule(self) -> tuple[int, bytes]:
        """The length of the longest token in bytes (0: no bound is known), and the bytes that the vocabulary lacks."""
        parts: dict[str, Any] = json.loads(self._tokenizer.to_str())
        if not _is_bound_valid(parts):
            return 0, b''
        names: dict[str, int] = parts['model']['vocab']
        return _longest_bytes(parts), bytes(byte for name, byte in BYTE_LEVEL.items() if name not in names)

    def min_count(self, text: str) -> int:
        """Return a lower bound on the number of tokens in `text`; 0 if no bound is known."""
        longest, missing_bytes = self._rule
        if not longest:
            return 0
        normalizer = self._tokenizer.normalizer
        read = normalizer.normalize_str(text) if normalizer is not None else text
        counted = read.encode('utf-8', 'replace').translate(None, missing_bytes)
        return -(-len(counted) // longest)


def _is_bound_valid(parts: dict[str, Any]) -> bool:
    model, normalizer = parts['model'], parts['normalizer']
    splits = _members(parts['pre_tokenizer'], 'pretokenizers')
    is_whole = all(
        split['type'] in {'ByteLevel', 'Digits'} or split.get('behavior', 'Removed') != 'Removed' for split in splits
    )
    return (
        model['type'] == 'BPE'
        and is_whole
        and any(split['type'] == 'ByteLevel' for split in splits)
        and (normalizer is None or normalizer['type'] in _PLAIN_NORMALIZERS)
        # An added token with `lstrip` or `rstrip` also covers all whitespace next to it.
        and not any(token['lstrip'] or token['rstrip'] for token in parts['added_tokens'])
    )


def _longest_bytes(parts: dict[str, Any]) -> int:
    """Return the length of the longest token in bytes; byte-level tokens have one character per byte."""
    added = max((len(token['content'].encode()) for token in parts['added_tokens']), default=1)
    return max(added, *(len(token) for token in parts['model']['vocab']))


def _members(part: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    return part[name] if part['type'] == 'Sequence' else [part]
