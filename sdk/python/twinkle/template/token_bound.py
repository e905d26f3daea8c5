"""How many tokens a text has at least, told without tokenising it: by its bytes and the longest token there is.

That is sound only where every byte that has a token at all is within some token, and no token stands for more of the
text than it is long. It is so for byte-level BPE; for every other tokenizer nothing is told.
"""

import json
from functools import cached_property
from typing import Any

import tokenizers

from twinkle.template.token_bytes import BYTE_LEVEL

_PLAIN_NORMALIZERS = {'NFC'}
"""Those that work the same on a text and on its parts, or make it shorter as a whole than in parts."""


class TokenBound:
    """The bound of one tokenizer.

    Concurrency: safe to share between threads.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        """Tell of `tokenizer`, which is looked at when it is asked about for the first time."""
        self._tokenizer = tokenizer

    @cached_property
    def _rule(self) -> tuple[int, bytes]:
        """The bytes of the longest token, 0 where nothing can be told, and the bytes that no token stands for."""
        parts: dict[str, Any] = json.loads(self._tokenizer.to_str())
        if not _is_sound(parts):
            return 0, b''
        names: dict[str, int] = parts['model']['vocab']
        return _longest_bytes(parts), bytes(byte for name, byte in BYTE_LEVEL.items() if name not in names)

    def least_count(self, text: str) -> int:
        """Return a number of tokens that `text` has at least; 0 where nothing can be told."""
        longest, left_out = self._rule
        if not longest:
            return 0
        normalizer = self._tokenizer.normalizer
        read = normalizer.normalize_str(text) if normalizer is not None else text
        counted = read.encode('utf-8', 'replace').translate(None, left_out)
        return -(-len(counted) // longest)


def _is_sound(parts: dict[str, Any]) -> bool:
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
        # Such a token takes all blanks beside it with it.
        and not any(token['lstrip'] or token['rstrip'] for token in parts['added_tokens'])
    )


def _longest_bytes(parts: dict[str, Any]) -> int:
    """Return the length of the longest token; a byte-level one has a character for each byte."""
    added = max((len(token['content'].encode()) for token in parts['added_tokens']), default=1)
    return max(added, *(len(token) for token in parts['model']['vocab']))


def _members(part: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    return part[name] if part['type'] == 'Sequence' else [part]
