"""Import of adapters that PEFT or another tool saved.

PEFT's configuration may contain regular expressions where `LoraConfig` has names. The layers and their ranks are
read from the tensors, so only alphas require matching of expressions. Folders are untrusted, so expressions that could
take long to match are refused. A running match cannot be interrupted, so limits on the lengths of expressions and paths
bound its time. A clock bounds only the total time of all matches.
"""

import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeVar, cast

from twinkle.checkpoint_engine.lora_layers import (
    AdapterLayer,
    Shapes,
    adapter_layers,
    canonical_names,
    endings,
    value_at,
)
from twinkle.checkpoint_engine.peft_config import parse_adapter_config
from twinkle.data_format import LoraConfig
from twinkle.data_format.lora import ALL_LINEAR, is_expert_weight

_Value = TypeVar('_Value')
_NAME = re.compile(r'[\w-]+(\.[\w-]+)*')
"""A path or its suffix, as opposed to a regular expression."""
_COSTLY = re.compile(r'\)[*+?{]|\\[1-9]|\(\?|\.[*+]\??\.[*+]')
"""Quantified groups, references, extensions and consecutive wildcards, which can make matching slow."""
_LITERAL = re.compile(r'\\.|\[[^\]]*\]', re.DOTALL)
"""An escape or a character class. Both match a single character."""
_MAX_PATTERN = 256
"""Maximum number of characters in an expression."""
_MAX_QUANTIFIERS = 2
"""Maximum number of quantifiers in an expression."""
_MAX_COMBINATIONS = 256
"""Maximum number of combinations of alternatives in an expression; each quantifier multiplies the number by four."""
_MAX_EXPRESSIONS = 256
"""Maximum number of entries in `alpha_pattern` if any entry is an expression."""
_MAX_PATH = 512
"""Maximum length of a tensor's canonical name. In real models, these names have about 100 characters."""
_MAX_PATH_PARTS = 32
"""Maximum number of dots in a tensor's canonical name."""
_MAX_COMPARISONS = 50_000_000
"""Maximum product of the number of names in a pattern and the number of tensors."""
_MATCHING_SECONDS = 10.0
"""Time limit for matching all expressions together."""
_EXCLUDING_FIELDS = ('exclude_modules', 'layers_to_transform', 'layers_pattern')
"""Fields of PEFT that exclude layers listed in `target_modules`."""


@dataclass(frozen=True)
class ImportedAdapter:
    """An adapter folder's configuration and tensor names."""

    config: LoraConfig
    """Configuration with the same layers, ranks and scaling factors that PEFT would use."""
    base_model: str
    """Base model named in the folder; may be empty."""
    names: Mapping[str, str]
    """Canonical name of each tensor, by its name in the file."""


def import_adapter(
    config_data: bytes, shapes: Shapes, *, seed: int | None = None, matching_seconds: float = _MATCHING_SECONDS
) -> ImportedAdapter:
    """Convert `adapter_config.json`, together with the shapes of the tensors, to a `LoraConfig`.

    Fields that `LoraConfig` can represent are kept unchanged; other fields are expanded to individual layers.

    Args:
        config_data: the configuration file.
        shapes: shape of each tensor, by its name in the file.
        seed: seed of the result.
        matching_seconds: time limit for matching all expressions together.

    Raises:
        ValueError: the adapter is not a LoRA, uses an unsupported feature, or is inconsistent.
    """
    parsed, base_model = parse_adapter_config(config_data, seed=seed)
    fields = cast(dict[str, Any], json.loads(config_data))
    names = canonical_names(list(shapes))
    _check_sizes(parsed, list(names.values()))
    layers = adapter_layers({names[name]: shape for name, shape in shapes.items()}, parsed)
    if not layers:
        raise ValueError('the adapter has no tensors')
    paths = [layer.path for layer in layers]
    config = replace(
        parsed,
        target_modules=_targets(parsed, fields, paths),
        rank_pattern=_rank_pattern(parsed, layers),
        alpha_pattern=_alpha_pattern(parsed, paths, matching_seconds),
    )
    return ImportedAdapter(config, base_model, names)


def _check_sizes(parsed: LoraConfig, names: list[str]) -> None:
    """Refuse names and patterns that would take too long to compare."""
    for name in names:
        if len(name) > _MAX_PATH or name.count('.') > _MAX_PATH_PARTS:
            raise ValueError(
                f'the name of tensor {name[:60]!r}... has more than {_MAX_PATH} characters or '
                f'{_MAX_PATH_PARTS + 1} parts between dots'
            )
    for field, pattern in (('rank_pattern', parsed.rank_pattern), ('alpha_pattern', parsed.alpha_pattern)):
        if len(pattern) * len(names) > _MAX_COMPARISONS:
            count = len(pattern)
            raise ValueError(f'{field} has too many names ({count}) for {len(names)} tensors; use common suffixes')


def _targets(parsed: LoraConfig, fields: Mapping[str, Any], paths: list[str]) -> str | tuple[str, ...]:
    targets = parsed.target_modules
    given = fields['target_modules']
    # A string other than 'all-linear' is an expression. It is not needed: the tensors determine the layers.
    is_expression = isinstance(given, str) and given != ALL_LINEAR
    if is_expression or any(fields.get(name) for name in _EXCLUDING_FIELDS):
        return tuple(sorted(paths))
    if isinstance(targets, str):
        return targets
    known = frozenset(targets) - {ALL_LINEAR}
    unused = set(known)
    for path in paths:
        matching = known.intersection(endings(path))
        if not matching and (is_expert_weight(path) or ALL_LINEAR not in targets):
            raise ValueError(f'the adapter has tensors of layer {path}, which target_modules does not include')
        unused -= matching
    if unused:
        raise ValueError(f'target_modules includes {min(unused)!r}, but the adapter has no tensors of it')
    return targets


def _rank_pattern(parsed: LoraConfig, layers: Sequence[AdapterLayer]) -> Mapping[str, int]:
    if not all(map(_NAME.fullmatch, parsed.rank_pattern)):
        if any(layer.expert_count for layer in layers):
            raise ValueError('rank_pattern must list names, not expressions, because the adapter has experts')
        return {layer.path: layer.rank for layer in layers if layer.rank != parsed.r}
    for layer in layers:
        expected = value_at(parsed.rank_pattern, layer.path, parsed.r)
        if expected != layer.rank:
            raise ValueError(
                f'layer {layer.path} has rank {expected} in r or rank_pattern, but its tensors have rank {layer.rank}'
            )
    return _used_names(parsed.rank_pattern, [layer.path for layer in layers])


def _alpha_pattern(parsed: LoraConfig, paths: list[str], matching_seconds: float) -> Mapping[str, float]:
    if all(map(_NAME.fullmatch, parsed.alpha_pattern)):
        return _used_names(parsed.alpha_pattern, paths)
    if len(parsed.alpha_pattern) > _MAX_EXPRESSIONS:
        raise ValueError(
            f'alpha_pattern has {len(parsed.alpha_pattern)} entries with expressions, but at most '
            f'{_MAX_EXPRESSIONS} are supported; list the layers by name instead'
        )
    expressions = [(_expression(text), alpha) for text, alpha in parsed.alpha_pattern.items()]
    found: dict[str, float] = {}
    deadline_seconds = time.monotonic() + matching_seconds
    for path in paths:
        if time.monotonic() > deadline_seconds:
            raise ValueError('the expressions in alpha_pattern take too long to match; list the layers by name')
        alpha = next((alpha for expression, alpha in expressions if expression.match(path)), parsed.lora_alpha)
        if alpha != parsed.lora_alpha:
            found[path] = alpha
    return found


def _used_names(pattern: Mapping[str, _Value], paths: Iterable[str]) -> Mapping[str, _Value]:
    """Return `pattern` without names that match no layer. PEFT ignores such names, but this library refuses them."""
    used = {name for path in paths for name in endings(path) if name in pattern}
    return {name: value for name, value in pattern.items() if name in used}


def _expression(text: str) -> re.Pattern[str]:
    """Compile a key of PEFT's patterns, which PEFT matches against a path or its suffix after a dot."""
    quantifiers = len(re.findall(r'[*+?{]', text))
    is_long = len(text) > _MAX_PATTERN or quantifiers > _MAX_QUANTIFIERS
    if is_long or _COSTLY.search(text) or _combination_count(text) * 4**quantifiers > _MAX_COMBINATIONS:
        raise ValueError(f'the expression {text[:60]!r} in alpha_pattern is too complex; list the layers by name')
    try:
        return re.compile(rf'(.*\.)?({text})$')
    except (re.error, OverflowError) as error:
        raise ValueError(f'the expression {text!r} in alpha_pattern is malformed: {error}') from None


def _combination_count(text: str) -> int:
    """Return an upper bound on the number of combinations of an expression's alternatives."""
    ways, counts = 1, [1]
    for character in _LITERAL.sub('', text):
        if character == '(':
            counts.append(1)
        elif character == '|':
            counts[-1] += 1
        elif character == ')' and len(counts) > 1:
            ways *= counts.pop()
    return ways * prod(counts)
