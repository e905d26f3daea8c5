"""The steps that prepare a dataset's rows."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class MapStep:
    """Changes rows with a preprocessor."""

    preprocessor: str
    init_args: Mapping[str, Any] = field(default_factory=dict[str, Any])
    kind: Literal['map'] = 'map'


@dataclass(frozen=True, kw_only=True)
class FilterStep:
    """Keeps the rows that a filter accepts."""

    filter: str
    init_args: Mapping[str, Any] = field(default_factory=dict[str, Any])
    kind: Literal['filter'] = 'filter'


@dataclass(frozen=True, kw_only=True)
class TemplateStep:
    """Sets the template that encodes chats."""

    base_model: str
    name: str = 'Template'
    max_length: int = 8192
    """Maximum number of tokens of a row."""
    truncation_strategy: Literal['raise', 'left', 'right', 'split', 'delete'] = 'raise'
    default_system: str | None = None
    """System message for chats without one; None for the default of the chat template."""
    is_thinking_enabled: bool = True
    kind: Literal['set_template'] = 'set_template'


@dataclass(frozen=True, kw_only=True)
class EncodeStep:
    """Encodes chats as tokens."""

    is_generation_prompt_added: bool = False
    row_format: str | None = None
    """Name of the rows' format; None to detect the format."""
    kind: Literal['encode'] = 'encode'


@dataclass(frozen=True, kw_only=True)
class PackStep:
    """Combines short rows into longer ones."""

    kind: Literal['pack'] = 'pack'


@dataclass(frozen=True, kw_only=True)
class CheckStep:
    """Reports rows from which training would learn nothing; reading such a row of a lazy dataset is an error."""

    row_format: str | None = None
    """See `EncodeStep`."""
    kind: Literal['check'] = 'check'


Step = MapStep | FilterStep | TemplateStep | EncodeStep | PackStep | CheckStep
