"""Convert the names of tokens in a vocabulary to the bytes they represent; used by `tokenizer`."""

import re
from dataclasses import dataclass
from typing import Any

_BYTE_NAME = re.compile(r'<0x([0-9A-Fa-f]{2})>')
_SPACE_MARK = '\u2581'


def _byte_level_table() -> dict[str, int]:
    """Map characters to bytes as in byte-level BPE: characters from U+0100 represent bytes that are not printable."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}


BYTE_LEVEL = _byte_level_table()
"""Map from the characters in byte-level vocabularies to bytes."""


@dataclass(frozen=True)
class TokenAlphabet:
    """The encoding of token names in a vocabulary."""

    is_byte_level: bool
    """If True, each character of a name is one byte. Otherwise a name is text, with U+2581 for a space, or one byte in
    the form `<0xE2>`."""

    @classmethod
    def of_decoder(cls, decoder: Any) -> 'TokenAlphabet':
        """Return the alphabet of a `tokenizers` decoder. For None (no decoder), names are text."""
        return cls(is_byte_level=decoder is not None and b'"ByteLevel"' in decoder.__getstate__())

    def to_bytes(self, name: str) -> bytes:
        """Return the bytes that a token of this name represents."""
        if self.is_byte_level:
            numbers = [BYTE_LEVEL.get(character) for character in name]
            return bytes(number for number in numbers if number is not None) if None not in numbers else name.encode()
        if match := _BYTE_NAME.fullmatch(name):
            return bytes([int(match[1], 16)])
        return name.replace(_SPACE_MARK, ' ').encode()
