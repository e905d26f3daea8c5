"""A model's tokenizer, read from its folder without transformers."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import tokenizers

from twinkle.template.errors import TemplateError
from twinkle.template.token_bound import TokenBound
from twinkle.template.token_bytes import TokenAlphabet

_SPECIAL_NAMES = ('bos_token', 'eos_token', 'unk_token', 'sep_token', 'pad_token', 'cls_token', 'mask_token')


@dataclass(frozen=True)
class TokenizedText:
    """Tokens of a text and where in it they come from."""

    token_ids: list[int]
    """T ids."""
    offsets: list[tuple[int, int]]
    """T ranges of characters `[begin, end)`."""


class ChatTokenizer:
    """Turns text into token ids and back; special tokens in the text are read as such."""

    def __init__(self, folder: Path) -> None:
        path = folder / 'tokenizer.json'
        if not path.is_file():
            raise TemplateError(f'{folder.name} has no tokenizer.json; save it with a fast tokenizer')
        self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        # What a folder says about cutting and padding is for other uses of it.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.settings = _read_settings(folder)
        """`tokenizer_config.json`, with `special_tokens_map.json` where that is all there is."""
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
        """Id of the end-of-sequence token, if the tokenizer names one."""
        return self.token_id(self.special_tokens.get('eos_token', ''))

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return self._tokenizer.get_vocab_size()

    def token_id(self, token: str) -> int | None:
        """Return the id of one token, or None if there is no such token."""
        return self._tokenizer.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        """Return what one token stands for; empty for an id without a token.

        The bytes of all tokens of a text, joined, are the text, save a space that some tokenizers put before it.
        """
        if token_id in self._added_texts:
            return self._added_texts[token_id].encode()
        return self._alphabet.to_bytes(self._tokenizer.id_to_token(token_id) or '')

    def is_special(self, token_id: int) -> bool:
        """Return whether `decode` can leave this token out."""
        return self._added_texts.get(token_id) in self.special_texts

    def tokenize(self, texts: Sequence[str]) -> list[TokenizedText]:
        """Tokenise texts together, adding no special tokens. Uses the cores the machine has."""
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [TokenizedText(encoding.ids, encoding.offsets) for encoding in encodings]

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, adding no special tokens."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def least_token_count(self, text: str) -> int:
        """Return a number of tokens that `text` has at least, without tokenising it; 0 where nothing can be told."""
        return self._bound.least_count(text)

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
