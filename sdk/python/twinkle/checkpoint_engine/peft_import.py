"""An adapter that peft or another tool saved, in our terms.

peft's configuration may say with regular expressions what ours says with names. Which layers there are, and of
which rank, is read from the tensors; only alphas need an expression, and since folders come from strangers, one
that could take long to match is refused.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from twinkle.checkpoint_engine.lora_layers import Shapes, canonical_names, is_named, layer_ranks, value_at
from twinkle.checkpoint_engine.peft_config import parse_adapter_config
from twinkle.data_format import LoraConfig
from twinkle.data_format.lora import ALL_LINEAR

_NAME = re.compile(r'[\w-]+(\.[\w-]+)*')
_COSTLY = re.compile(r'\)[*+?{]|\\[1-9]|\(\?')
"""Quantified groups, references and extensions: what can make matching exponential."""
_MAX_PATTERN = 256
_MAX_QUANTIFIERS = 2
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


def import_adapter(config_data: bytes, shapes: Shapes, *, seed: int | None = None) -> ImportedAdapter:
    """Read `adapter_config.json` together with the shapes of the tensors beside it.

    What our configuration can say in the folder's own words is kept in them; the rest is said layer by layer.

    Args:
        config_data: The configuration file.
        shapes: Of the tensors, by their names in the file.
        seed: The seed to put into the result.

    Raises:
        ValueError: it is no LoRA, asks for what is not supported, or its parts contradict each other.
    """
    parsed, base_model = parse_adapter_config(config_data, seed=seed)
    fields = cast(dict[str, Any], json.loads(config_data))
    names = canonical_names(list(shapes))
    ranks = layer_ranks({names[name]: shape for name, shape in shapes.items()})
    if not ranks:
        raise ValueError('it holds no tensors')
    config = replace(
        parsed,
        target_modules=_targets(parsed, fields, list(ranks)),
        rank_pattern=_rank_pattern(parsed, ranks),
        alpha_pattern=_alpha_pattern(parsed, list(ranks)),
    )
    return ImportedAdapter(config, base_model, names)


def _targets(parsed: LoraConfig, fields: Mapping[str, Any], paths: list[str]) -> str | tuple[str, ...]:
    targets = parsed.target_modules
    if any(fields.get(name) for name in _NARROWING):
        return tuple(sorted(paths))
    if isinstance(targets, str):
        # Any other string is an expression, which the tensors make superfluous.
        return targets if targets == ALL_LINEAR else tuple(sorted(paths))
    for path in paths:
        if not any(is_named(path, name) for name in targets):
            raise ValueError(f'target_modules does not name layer {path}, of which there are tensors')
    for name in targets:
        if not any(is_named(path, name) for path in paths):
            raise ValueError(f'target_modules names {name!r}, of which there are no tensors')
    return targets


def _rank_pattern(parsed: LoraConfig, ranks: Mapping[str, int]) -> Mapping[str, int]:
    if not all(map(_NAME.fullmatch, parsed.rank_pattern)):
        return {path: rank for path, rank in ranks.items() if rank != parsed.r}
    for path, rank in ranks.items():
        said = value_at(parsed.rank_pattern, path, parsed.r)
        if said != rank:
            raise ValueError(f'r or rank_pattern says rank {said} of layer {path}, its tensors are of rank {rank}')
    return parsed.rank_pattern


def _alpha_pattern(parsed: LoraConfig, paths: list[str]) -> Mapping[str, float]:
    if all(map(_NAME.fullmatch, parsed.alpha_pattern)):
        return parsed.alpha_pattern
    expressions = [(_expression(text), alpha) for text, alpha in parsed.alpha_pattern.items()]
    found: dict[str, float] = {}
    for path in paths:
        alpha = next((alpha for expression, alpha in expressions if expression.match(path)), parsed.lora_alpha)
        if alpha != parsed.lora_alpha:
            found[path] = alpha
    return found


def _expression(text: str) -> re.Pattern[str]:
    """Return a key of peft's patterns as peft matches it: the end of a path, from a dot on."""
    quantifiers = len(re.findall(r'[*+?{]', text))
    if len(text) > _MAX_PATTERN or quantifiers > _MAX_QUANTIFIERS or _COSTLY.search(text):
        raise ValueError(f'the expression {text[:60]!r} in alpha_pattern is too involved; name the layers instead')
    try:
        return re.compile(rf'(.*\.)?({text})$')
    except (re.error, OverflowError) as error:
        raise ValueError(f'the expression {text!r} in alpha_pattern is malformed: {error}') from None
