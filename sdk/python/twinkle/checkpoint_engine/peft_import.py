"""An adapter that peft or another tool saved, in our terms.

peft's configuration may say with regular expressions what ours says with names. Which layers there are, and of
which rank, is read from the tensors; only alphas need an expression, and since folders come from strangers, one
that could take long to match is refused. A match cannot be stopped from outside, so what one may take is bounded by
the lengths of expression and path, and only their sum by a clock.
"""

import json
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeVar, cast

from twinkle.checkpoint_engine.lora_layers import Shapes, canonical_names, endings, layer_ranks, value_at
from twinkle.checkpoint_engine.peft_config import parse_adapter_config
from twinkle.data_format import LoraConfig
from twinkle.data_format.lora import ALL_LINEAR

_Value = TypeVar('_Value')
_NAME = re.compile(r'[\w-]+(\.[\w-]+)*')
_COSTLY = re.compile(r'\)[*+?{]|\\[1-9]|\(\?|\.[*+]\??\.[*+]')
"""Quantified groups, references, extensions and a wildcard after another: what makes matching slow to no use."""
_LITERAL = re.compile(r'\\.|\[[^\]]*\]', re.DOTALL)
"""What stands for one character, whatever is in it."""
_MAX_PATTERN = 256
_MAX_QUANTIFIERS = 2
_MAX_WAYS = 256
"""Ways through the alternatives of an expression; each quantifier counts as four."""
_MAX_EXPRESSIONS = 256
_MAX_PATH = 512
"""Characters of a layer's path; those of real models have about a hundred."""
_MAX_PATH_PARTS = 32
_MAX_COMPARISONS = 50_000_000
"""Names of a pattern times layers."""
_MATCHING_SECONDS = 10.0
"""For all expressions together, where every bound of one is kept."""
_NARROWING = ('exclude_modules', 'layers_to_transform', 'layers_pattern')
"""Fields of peft that leave out layers which `target_modules` names."""


@dataclass(frozen=True)
class ImportedAdapter:
    """What a folder holds, in our terms."""

    config: LoraConfig
    """Means the layers, ranks and scalings that peft would use."""
    base_model: str
    """As the folder names it; may be empty."""
    names: Mapping[str, str]
    """Each tensor's canonical name by its name in the file."""


def import_adapter(
    config_data: bytes, shapes: Shapes, *, seed: int | None = None, matching_seconds: float = _MATCHING_SECONDS
) -> ImportedAdapter:
    """Read `adapter_config.json` together with the shapes of the tensors beside it.

    What our configuration can say in the folder's own words is kept in them; the rest is said layer by layer.

    Args:
        config_data: The configuration file.
        shapes: Of the tensors, by their names in the file.
        seed: The seed to put into the result.
        matching_seconds: How long all expressions may take together.

    Raises:
        ValueError: it is no LoRA, asks for what is not supported, or its parts contradict each other.
    """
    parsed, base_model = parse_adapter_config(config_data, seed=seed)
    fields = cast(dict[str, Any], json.loads(config_data))
    names = canonical_names(list(shapes))
    _check_sizes(parsed, list(names.values()))
    ranks = layer_ranks({names[name]: shape for name, shape in shapes.items()})
    if not ranks:
        raise ValueError('it holds no tensors')
    config = replace(
        parsed,
        target_modules=_targets(parsed, fields, list(ranks)),
        rank_pattern=_rank_pattern(parsed, ranks),
        alpha_pattern=_alpha_pattern(parsed, list(ranks), matching_seconds),
    )
    return ImportedAdapter(config, base_model, names)


def _check_sizes(parsed: LoraConfig, names: list[str]) -> None:
    """Refuse what would take long to compare, before anything is compared."""
    for name in names:
        if len(name) > _MAX_PATH or name.count('.') > _MAX_PATH_PARTS:
            raise ValueError(
                f'tensor {name[:60]!r}... has a name of more than {_MAX_PATH} characters or {_MAX_PATH_PARTS} parts'
            )
    for field, pattern in (('rank_pattern', parsed.rank_pattern), ('alpha_pattern', parsed.alpha_pattern)):
        if len(pattern) * len(names) > _MAX_COMPARISONS:
            raise ValueError(f'{field} has {len(pattern)} names for {len(names)} tensors; name layers by common ends')


def _targets(parsed: LoraConfig, fields: Mapping[str, Any], paths: list[str]) -> str | tuple[str, ...]:
    targets = parsed.target_modules
    if any(fields.get(name) for name in _NARROWING):
        return tuple(sorted(paths))
    if isinstance(targets, str):
        # Any other string is an expression, which the tensors make superfluous.
        return targets if targets == ALL_LINEAR else tuple(sorted(paths))
    unseen = set(targets)
    known = frozenset(targets)
    for path in paths:
        naming = known.intersection(endings(path))
        if not naming:
            raise ValueError(f'target_modules does not name layer {path}, of which there are tensors')
        unseen -= naming
    if unseen:
        raise ValueError(f'target_modules names {min(unseen)!r}, of which there are no tensors')
    return targets


def _rank_pattern(parsed: LoraConfig, ranks: Mapping[str, int]) -> Mapping[str, int]:
    if not all(map(_NAME.fullmatch, parsed.rank_pattern)):
        return {path: rank for path, rank in ranks.items() if rank != parsed.r}
    for path, rank in ranks.items():
        said = value_at(parsed.rank_pattern, path, parsed.r)
        if said != rank:
            raise ValueError(f'r or rank_pattern says rank {said} of layer {path}, its tensors are of rank {rank}')
    return _in_use(parsed.rank_pattern, ranks)


def _alpha_pattern(parsed: LoraConfig, paths: list[str], matching_seconds: float) -> Mapping[str, float]:
    if all(map(_NAME.fullmatch, parsed.alpha_pattern)):
        return _in_use(parsed.alpha_pattern, paths)
    if len(parsed.alpha_pattern) > _MAX_EXPRESSIONS:
        raise ValueError(
            f'alpha_pattern has {len(parsed.alpha_pattern)} entries, expressions among them; '
            f'at most {_MAX_EXPRESSIONS} are matched; name the layers instead'
        )
    expressions = [(_expression(text), alpha) for text, alpha in parsed.alpha_pattern.items()]
    found: dict[str, float] = {}
    deadline_seconds = time.monotonic() + matching_seconds
    for path in paths:
        if time.monotonic() > deadline_seconds:
            raise ValueError('the expressions in alpha_pattern take too long to match; name the layers instead')
        alpha = next((alpha for expression, alpha in expressions if expression.match(path)), parsed.lora_alpha)
        if alpha != parsed.lora_alpha:
            found[path] = alpha
    return found


def _in_use(pattern: Mapping[str, _Value], paths: Iterable[str]) -> Mapping[str, _Value]:
    """Leave out names of no layer: peft lets them be, an adapter that is made here is refused for them."""
    used = {name for path in paths for name in endings(path) if name in pattern}
    return {name: value for name, value in pattern.items() if name in used}


def _expression(text: str) -> re.Pattern[str]:
    """Return a key of peft's patterns as peft matches it: the end of a path, from a dot on."""
    quantifiers = len(re.findall(r'[*+?{]', text))
    is_long = len(text) > _MAX_PATTERN or quantifiers > _MAX_QUANTIFIERS
    if is_long or _COSTLY.search(text) or _ways(text) * 4**quantifiers > _MAX_WAYS:
        raise ValueError(f'the expression {text[:60]!r} in alpha_pattern is too involved; name the layers instead')
    try:
        return re.compile(rf'(.*\.)?({text})$')
    except (re.error, OverflowError) as error:
        raise ValueError(f'the expression {text!r} in alpha_pattern is malformed: {error}') from None


def _ways(text: str) -> int:
    """Return how many ways at most lead through an expression's alternatives, one group after or in another."""
    ways, counts = 1, [1]
    for character in _LITERAL.sub('', text):
        if character == '(':
            counts.append(1)
        elif character == '|':
            counts[-1] += 1
        elif character == ')' and len(counts) > 1:
            ways *= counts.pop()
    return ways * prod(counts)
