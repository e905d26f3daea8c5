"""Descriptions of configuration fields: their types, defaults and meanings."""

import importlib
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import ClassVar, Literal

import pytest
from pydantic import BaseModel, Field

from twinkle_services.kit.config import ServiceConfig, load_config
from twinkle_services.kit.config_fields import FieldDescription, describe_fields, help_text

SERVICES = ('checkpoint', 'data', 'gateway', 'model', 'sampler')


class Section(BaseModel):
    """Settings of a part."""

    size: int = Field(default=1, ge=1, le=8)
    """Number of
    parts."""


class Example(ServiceConfig):
    """Settings of a service that does not exist."""

    service: ClassVar[str] = 'example'

    name: str = Field(min_length=1)
    """Name of the example."""
    kind: Literal['a', 'b'] | None = None
    """Kind of the example."""
    weights: Mapping[str, float] = {}
    """Weight by name."""
    folders: tuple[Path, ...] = (Path('one'), Path('two'))
    """Folders to read."""
    wait: timedelta = Field(default=timedelta(days=30), gt=timedelta())
    """Time to wait."""
    part: Section = Section()


def described() -> dict[str, FieldDescription]:
    return {field.path: field for field in describe_fields(Example)}


@pytest.mark.parametrize(
    ('path', 'kind', 'default', 'meaning'),
    [
        ('name', 'text, length at least 1', 'required', 'Name of the example.'),
        ('kind', "'a' or 'b' or unset", 'unset', 'Kind of the example.'),
        ('weights', 'mapping of text to number', '{}', 'Weight by name.'),
        ('folders', 'list of path', '[one, two]', 'Folders to read.'),
        ('wait', 'duration', '2592000 s', 'Time to wait.'),
        ('part.size', 'integer, at least 1, at most 8', '1', 'Number of parts.'),
    ],
)
def test_a_field_is_described(path: str, kind: str, default: str, meaning: str) -> None:
    """The description has the type with its bounds, the default, and the docstring on one line."""
    assert described()[path] == FieldDescription(path, kind, default, meaning)


def test_fields_of_the_base_class_are_described() -> None:
    """Fields that all services share precede those of the service, and a section is replaced by its fields."""
    paths = list(described())
    assert paths[0] == 'listen'
    assert 'limits.queue_length' in paths
    assert 'part' not in paths


@pytest.mark.parametrize('service', SERVICES)
def test_every_field_of_a_service_has_a_meaning(service: str) -> None:
    """No field of a shipped service lacks a docstring, and no type is shown as Python code."""
    module = importlib.import_module(f'twinkle_services.{service}.config')
    kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, ServiceConfig)]
    (config_class,) = [kind for kind in kinds if kind.service == service]
    fields = list(describe_fields(config_class))
    assert [field.path for field in fields if not field.explanation] == []
    assert [
        field.kind for field in fields if '[' in field.kind.partition(', matching')[0] or '.' in field.kind[:9]
    ] == []


def test_the_command_line_prints_the_fields(capsys: pytest.CaptureFixture[str]) -> None:
    """`--help-fields` prints every field and ends with status 0, although required fields are missing."""
    with pytest.raises(SystemExit) as end:
        load_config(Example, ['--help-fields'])
    assert end.value.code == 0
    assert capsys.readouterr().out.strip() == help_text(Example)
    assert 'name: text, length at least 1, required\n    Name of the example.' in help_text(Example)
