"""Signatures of generated model cards, by which a later upload recognizes that a card was not edited."""

import re

from blake3 import blake3

CARD_FILE = 'README.md'
"""Name of the file with the model card."""
_SIGNATURE = re.compile(rb'<!-- twinkle card ([0-9a-f]{32}) -->\n\Z')


def signed_card(text: str) -> bytes:
    """Return the content of a generated card: `text` with a comment that contains its digest."""
    data = text.encode()
    return data + f'<!-- twinkle card {_digest(data)} -->\n'.encode()


def is_generated(card: bytes) -> bool:
    """Return whether a card was generated and is unchanged."""
    signature = _SIGNATURE.search(card)
    return signature is not None and signature[1].decode() == _digest(card[: signature.start()])


def _digest(data: bytes) -> str:
    return blake3(data).hexdigest()[:32]
