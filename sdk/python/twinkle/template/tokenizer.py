"""The tokenizer of a model, loaded from its folder without transformers."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import tokenizers

from twinkle.template.errors import TemplateError
from twinkle.template.token_bound import TokenBound
from twinkle.template.token_bytes import TokenAlphabet

_SPECIAL_NAMES = ('bos_token', 'eos_token', 'unk_token', 'sep_token', 'pad_token', 'cls_token', 'mask_token')


@dataclass(frozen=True)
class TokenizedText:
    """The tokens of a text and their positions in the text."""

    token_ids: list[int]
    """Token ids, length T."""
    offsets: list[tuple[int, int]]
    """Character range `[begin, end)` of each token, length T."""


class ChatTokenizer:
    """Converts text to token ids and back; special tokens in the text are recognized.

    Args:
        folder: model folder with a `tokenizer.json`.

    Raises:
        TemplateError: the folder has no `tokenizer.json`.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / 'tokenizer.json'
        if not path.is_file():
            raise TemplateError(f'{folder.name} has no tokenizer.json; save the model with a fast tokenizer')
        self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        # Truncation and padding stored in the file are defaults for other uses of the tokenizer.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.settings = _read_settings(folder)
        """`special_tokens_map.json` updated with `tokenizer_config.json`; either file may be missing."""
        self.special_tokens = _special_tokens(self.settings)
        """Text of the named special tokens, such as `eos_token`."""
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_texts = frozenset(token.content for token in added.values() if token.special)
        """Text of every special token, named or not."""
        self._added_texts = {token_id: token.content for token_id, token in added.items()}
        self._alphabet = TokenAlphabet.of_decoder(self._tokenizer.decoder)
        self._bound = TokenBound(self._tokenizer)

    @property
    def eos_token_id(self) -> int | None:
        """Id of the end-of-sequence token, or None if the tokenizer has no such token."""
        return self.token_id(self.special_tokens.get('eos_token', ''))

    @cached_property
    def text_opening(self) -> str:
        """Text of the token that begins a plain text, such as `<s>`; empty for models without such a token."""
        token = self.special_tokens.get('bos_token', '')
        begin = self._tokenizer.encode('').ids[:1]
        return token if token and begin == [self.token_id(token)] else ''

    @property
    def text_end(self) -> str:
        """Text of the end-of-sequence token; empty if the tokenizer has no such token."""
        return self.special_tokens.get('eos_token', '')

    @property
    def vocab_size(self) -> int:
        """Number of token ids, including added tokens."""
        return self._tokenizer.get_vocab_size()

    def token_id(self, token: str) -> int | None:
        """Return the id of a token, or None if the token does not exist."""
        return self._tokenizer.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes of one token; an id without a token gives empty bytes.

        The concatenated bytes of a text's tokens equal the text, except for a space that some tokenizers prepend.
        """
        if token_id in self._added_texts:
            return self._added_texts[token_id].encode()
        return self._alphabet.to_bytes(self._tokenizer.id_to_token(token_id) or '')

    def is_special(self, token_id: int) -> bool:
        """Return whether this is a special token, which `decode` can skip."""
        return self._added_texts.get(token_id) in self.special_texts

    def tokenize(self, texts: Sequence[str]) -> list[TokenizedText]:
        """Tokenize texts without adding special tokens, in order. Uses all CPU cores."""
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [TokenizedText(encoding.ids, encoding.offsets) for encoding in encodings]

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text` without adding special tokens."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def min_token_count(self, text: str) -> int:
        """Return a lower bound on the number of tokens in `text` without tokenizing it; 0 if no bound is known."""
        return self._bound.min_count(text)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids; bytes that form no character become U+FFFD."""
        return self._tokenizer.decode([int(token) for token in token_ids], skip_special_tokens=skip_special_tokens)


def _read_settings(folder: Path) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for name in ('special_tokens_map.json', 'tokenizer_config.json'):
        path = folder / name
        if path.is_file():
            settings |= cast('dict[str, Any]', json.loads(path.read_text()))
    return settings


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    texts = {name: _token_text(settings.get(name)) for name in _SPECIAL_NAMES}
    return {name: text for name, text in texts.items() if text is not None}


def _token_text(value: Any) -> str | None:
    return cast('dict[str, str]', value).get('content') if isinstance(value, dict) else value
