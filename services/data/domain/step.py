"""The steps of a dataset's recipe."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class MapStep:
    """Rewrite rows by a named preprocessor."""

    preprocessor: str
    init_args: Mapping[str, Any] = field(default_factory=dict[str, Any])
    kind: Literal['map'] = 'map'


@dataclass(frozen=True, kw_only=True)
class FilterStep:
    """Keep rows that a named filter accepts."""

    filter: str
    init_args: Mapping[str, Any] = field(default_factory=dict[str, Any])
    kind: Literal['filter'] = 'filter'


@dataclass(frozen=True, kw_only=True)
class TemplateStep:
    """Choose how chats become tokens."""

    base_model: str
    name: str = 'Template'
    max_length: int = 8192
    """Most tokens of an example."""
    truncation_strategy: Literal['raise', 'left', 'right', 'split', 'delete'] = 'raise'
    default_system: str | None = None
    """None: whatever the chat template does."""
    is_thinking_enabled: bool = True
    kind: Literal['set_template'] = 'set_template'


@dataclass(frozen=True, kw_only=True)
class EncodeStep:
    """Turn chats into tokens."""

    is_generation_prompt_added: bool = False
    kind: Literal['encode'] = 'encode'


@dataclass(frozen=True, kw_only=True)
class PackStep:
    """Join short examples."""

    kind: Literal['pack'] = 'pack'


@dataclass(frozen=True, kw_only=True)
class CheckStep:
    """Report examples that would train on nothing."""

    kind: Literal['check'] = 'check'


Step = MapStep | FilterStep | TemplateStep | EncodeStep | PackStep | CheckStep
