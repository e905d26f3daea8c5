"""The tokenizer of a model folder as fields of a GGUF file: byte-level BPE whose way of splitting text is known.

llama.cpp splits text in its own code, selected by a name. A tokenizer is accepted only if its steps are those of a
name, because another way of splitting would give other tokens without an error.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf

from twinkle.checkpoint_engine.errors import InvalidModelFolder

_FILE = 'tokenizer.json'
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r' ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
_SPLIT_NAMES: Mapping[tuple[Any, ...], str] = {
    (('ByteLevel', True),): 'gpt-2',
    (('Digits', True), ('ByteLevel', True)): 'smollm',
    (('Split', rf'{_CONTRACTIONS}|\p{{N}}|{_REST}'), ('ByteLevel', False)): 'qwen2',
    (('Split', rf'{_CONTRACTIONS}|\p{{N}}{{1,3}}|{_REST}'), ('ByteLevel', False)): 'llama-bpe',
}
"""Names in llama.cpp, by the steps of a tokenizer."""
_NORMALIZERS = (None, 'NFC')
"""Normalizers that llama.cpp does without; text is rarely in another form than NFC."""


class GgufTokenizer:
    """The tokenizer of a model folder."""

    def __init__(self, folder: Path, *, token_count: int) -> None:
        """Read and check the tokenizer.

        Args:
            folder: the model's folder.
            token_count: number of rows of the embedding; ids without a token get an unused token.

        Raises:
            InvalidModelFolder: the tokenizer is missing, malformed, or of another kind.
        """
        try:
            content = json.loads((folder / _FILE).read_bytes())
            self._content, self._split_name = content, _split_name(content)
            self._tokens, self._kinds = _tokens(content, token_count)
        except FileNotFoundError:
            raise InvalidModelFolder(_FILE, 'is missing') from None
        except InvalidModelFolder:
            raise
        except (ValueError, LookupError, TypeError, AttributeError):
            raise InvalidModelFolder(_FILE, 'is malformed') from None
        self._special = gguf.SpecialVocab(folder, load_merges=True, n_vocab=token_count)

    def add_to(self, writer: gguf.GGUFWriter) -> None:
        """Add tokens, merges, special tokens and chat template to a file."""
        writer.add_tokenizer_model('gpt2')
        writer.add_tokenizer_pre(self._split_name)
        writer.add_token_list(self._tokens)
        writer.add_token_types(self._kinds)
        self._special.add_to_gguf(writer, quiet=True)


def _split_name(content: dict[str, Any]) -> str:
    model = content['model']
    if model['type'] != 'BPE' or model.get('byte_fallback') or not model['merges']:
        raise InvalidModelFolder(
            _FILE, 'is not a byte-level BPE with merges; other tokenizers are not supported in GGUF'
        )
    normalizer: dict[str, Any] = content.get('normalizer') or {}
    name = _SPLIT_NAMES.get(_steps(content.get('pre_tokenizer') or {'type': 'none'}))
    if name is None or normalizer.get('type') not in _NORMALIZERS:
        names = ', '.join(_SPLIT_NAMES.values())
        raise InvalidModelFolder(_FILE, f'splits text in another way than those that are supported in GGUF: {names}')
    return name


def _steps(value: dict[str, Any]) -> tuple[Any, ...]:
    """Return the steps of a pre-tokenizer with the options that matter."""
    kind = value['type']
    if kind == 'Sequence':
        return tuple(step for item in value['pretokenizers'] for step in _steps(item))
    if kind == 'ByteLevel' and not value['add_prefix_space']:
        return (('ByteLevel', value.get('use_regex', True)),)
    if kind == 'Digits':
        return (('Digits', value['individual_digits']),)
    if kind == 'Split' and value['behavior'] == 'Isolated' and not value['invert']:
        return (('Split', value['pattern'].get('Regex')),)
    return ((kind,),)


def _tokens(content: dict[str, Any], count: int) -> tuple[list[str], list[gguf.TokenType]]:
    tokens = [f'[PAD{index}]' for index in range(count)]
    kinds = [gguf.TokenType.UNUSED] * count
    for token, index in content['model']['vocab'].items():
        tokens[index], kinds[index] = token, gguf.TokenType.NORMAL
    for added in content.get('added_tokens', ()):
        kind = gguf.TokenType.CONTROL if added['special'] else gguf.TokenType.USER_DEFINED
        tokens[added['id']], kinds[added['id']] = added['content'], kind
    return tokens, kinds
