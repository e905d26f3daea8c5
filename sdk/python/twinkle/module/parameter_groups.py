"""Parameter groups: optimizer options that depend on the path of the parameter.

A group is a mapping with `pattern` and the options that differ, such as `{'pattern': 'lora_B', 'lr': 1.6e-3}` for a
separate learning rate of B (Hayou et al. 2024, arXiv:2402.12354, section 5). The optimizer defines the options.
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

PATTERN = 'pattern'
"""Key of a group that selects its parameters."""


def matches(pattern: str, path: str) -> bool:
    """Return whether the dotted parts of `pattern` occur consecutively in `path`.

    'q_proj', 'layers.0' and 'q_proj.lora_B' match `model.layers.0.self_attn.q_proj.lora_B.weight`; `*` in a part
    matches any text within one part.
    """
    pattern_parts, parts = pattern.split('.'), path.split('.')
    starts = range(len(parts) - len(pattern_parts) + 1)
    return any(all(map(fnmatchcase, parts[start : start + len(pattern_parts)], pattern_parts)) for start in starts)


def split_parameters(
    parameters: Mapping[str, Tensor], groups: Sequence[Mapping[str, Any]], *, allowed: frozenset[str]
) -> list[dict[str, Any]]:
    """Return the groups in torch's format: first the parameters without a group, then one entry per group.

    A parameter belongs to the first group whose pattern matches its path.

    Args:
        parameters: parameters by path; the result keeps their order.
        groups: groups as given by the user.
        allowed: options that a group may set.

    Raises:
        ValueError: a group is malformed, sets an option that is not allowed, or has no parameters.
    """
    _check_groups(groups, allowed)
    members: list[list[Tensor]] = [[] for _ in groups]
    rest: list[Tensor] = []
    for path, parameter in parameters.items():
        index = next((index for index, group in enumerate(groups) if matches(group[PATTERN], path)), None)
        (rest if index is None else members[index]).append(parameter)
    for index, group in enumerate(groups):
        if not members[index]:
            raise ValueError(
                f'groups[{index}].pattern {group[PATTERN]!r} matches no parameter that is not in an earlier group; '
                f'the first parameter is {next(iter(parameters))}'
            )
    first = [{'params': rest}] if rest else []
    return [*first, *({**group, 'params': own} for group, own in zip(groups, members, strict=True))]


def _check_groups(groups: Any, allowed: frozenset[str]) -> None:
    if not isinstance(groups, Sequence) or isinstance(groups, str) or not all(isinstance(g, Mapping) for g in groups):
        raise ValueError(f'groups must be a list of mappings with a pattern, got {groups!r}')
    for index, group in enumerate(groups):
        pattern = group.get(PATTERN)
        if not isinstance(pattern, str) or not all(pattern.split('.')):
            raise ValueError(f'groups[{index}].pattern must be parts of a path such as q_proj, got {pattern!r}')
        unknown = sorted(set(group) - allowed - {PATTERN})
        if unknown:
            raise ValueError(f'groups[{index}] has unknown options {unknown}; it takes {sorted(allowed)}')
