"""What a token's name in a vocabulary stands for, as bytes. The tokenizer that has the names is beside it."""

import re
from dataclasses import dataclass
from typing import Any

_BYTE_NAME = re.compile(r'<0x([0-9A-Fa-f]{2})>')
_SPACE_MARK = '\u2581'


def _byte_level_table() -> dict[str, int]:
    """Return character to byte, as byte-level BPE names them: what can be seen stands for itself, the rest follows."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in seen]
    table = {chr(byte): byte for byte in seen}
    return table | {chr(0x100 + place): byte for place, byte in enumerate(hidden)}


BYTE_LEVEL = _byte_level_table()
"""Characters that byte-level tokenizers write for bytes."""


@dataclass(frozen=True)
class TokenAlphabet:
    """How the names of tokens are spelled."""

    is_byte_level: bool
    """Each character of a name is a byte; else names are text, `<0xE2>` is a byte, and a mark stands for a space."""

    @classmethod
    def of_decoder(cls, decoder: Any) -> 'TokenAlphabet':
        """Return the alphabet that a `tokenizers` decoder reads; None has none of its own."""
        return cls(is_byte_level=decoder is not None and b'"ByteLevel"' in decoder.__getstate__())

    def to_bytes(self, name: str) -> bytes:
        """Return what a token of this name stands for."""
        if self.is_byte_level:
            numbers = [BYTE_LEVEL.get(character) for character in name]
            return bytes(number for number in numbers if number is not None) if None not in numbers else name.encode()
        if match := _BYTE_NAME.fullmatch(name):
            return bytes([int(match[1], 16)])
        return name.replace(_SPACE_MARK, ' ').encode()
