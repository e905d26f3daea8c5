"""Parameter groups: options of an optimizer that differ by the path of the parameter.

A group is a mapping with `pattern` and the options that differ, such as `{'pattern': 'lora_B', 'lr': 1.6e-3}`
for a rate of B of its own (Hayou et al. 2024, arXiv:2402.12354, section 5). Which options there are is the
optimizer's business.
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

PATTERN = 'pattern'
"""The key of a group that says which parameters are in it."""


def matches(pattern: str, path: str) -> bool:
    """Whether the dotted parts of `pattern` stand in `path` one after the other.

    'q_proj', 'layers.0' and 'q_proj.lora_B' match `model.layers.0.self_attn.q_proj.lora_B.weight`; a part
    may hold `*`, which stands for anything within one part.
    """
    wanted, parts = pattern.split('.'), path.split('.')
    starts = range(len(parts) - len(wanted) + 1)
    return any(all(map(fnmatchcase, parts[start : start + len(wanted)], wanted)) for start in starts)


def split_parameters(
    parameters: Mapping[str, Tensor], groups: Sequence[Mapping[str, Any]], *, allowed: frozenset[str]
) -> list[dict[str, Any]]:
    """Return the groups as torch wants them: first what no pattern matches, then each pattern's.

    A parameter belongs to the first group whose pattern matches its path.

    Args:
        parameters: by path, in a fixed order, which the groups keep.
        groups: what the user gave; checked here.
        allowed: options a group may set.

    Raises:
        ValueError: a group is malformed, sets what it must not, or has no parameters.
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
                f'groups[{index}].pattern {group[PATTERN]!r} matches no parameter that an earlier group has not; '
                f'the first of them is {next(iter(parameters))}'
            )
    first = [{'params': rest}] if rest else []
    return [*first, *({**group, 'params': taken} for group, taken in zip(groups, members, strict=True))]


def _check_groups(groups: Any, allowed: frozenset[str]) -> None:
    if not isinstance(groups, Sequence) or isinstance(groups, str) or not all(isinstance(g, Mapping) for g in groups):
        raise ValueError(f'groups must be a list of mappings with a pattern each, got {groups!r}')
    for index, group in enumerate(groups):
        pattern = group.get(PATTERN)
        if not isinstance(pattern, str) or not all(pattern.split('.')):
            raise ValueError(f'groups[{index}].pattern must be parts of a path such as q_proj, got {pattern!r}')
        unknown = sorted(set(group) - allowed - {PATTERN})
        if unknown:
            raise ValueError(f'groups[{index}] has unknown options {unknown}; it takes {sorted(allowed)}')
