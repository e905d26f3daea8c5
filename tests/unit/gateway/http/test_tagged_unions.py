"""Tagged unions of JSON objects: the tag selects the class, and errors have the paths of the document."""

from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from twinkle_services.gateway.http.validation import JsonModel, Tagged, read_model
from twinkle_services.kit.errors import InvalidField


class Circle(JsonModel):
    """Shape with a radius."""

    kind: Literal['circle', 'disk']
    radius: int


class Group(JsonModel):
    """Shape that contains shapes."""

    kind: Literal['group']
    shapes: 'list[Shape]'


Shape = Annotated[Circle | Group, Tagged('kind', note=' here')]
Group.model_rebuild()


class Drawing(JsonModel):
    """Body with shapes."""

    shapes: Annotated[list[Shape], Field(fail_fast=True)]
    frame: Annotated[Circle | Group, Tagged('kind')] | None = None


def test_tag_selects_the_class_of_nested_objects() -> None:
    """Each object becomes an instance of the class that its tag selects."""
    nested = {'kind': 'group', 'shapes': [{'kind': 'circle', 'radius': 1}, {'kind': 'disk', 'radius': 2}]}
    drawing = read_model(Drawing, {'shapes': [nested]})
    (group,) = drawing.shapes
    assert isinstance(group, Group)
    assert group.shapes == [Circle(kind='circle', radius=1), Circle(kind='disk', radius=2)]
    assert read_model(Drawing, {'shapes': [group]}).shapes == [group]


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({'shapes': [3]}, 'shapes[0]', 'must be an object'),
    ({'shapes': [{'kind': 'line'}]}, 'shapes[0].kind', "must be one of 'circle', 'disk', 'group' here"),
    ({'shapes': [{'kind': []}]}, 'shapes[0].kind', "must be one of 'circle', 'disk', 'group' here"),
    ({'shapes': [], 'frame': {'radius': 1}}, 'frame.kind', 'is required'),
    ({'shapes': [{'kind': 'disk'}]}, 'shapes[0].radius', 'is required'),
    ({'shapes': [{'kind': 'disk', 'radius': 1, 'x': 1}]}, 'shapes[0].x', "is not a known parameter with kind 'disk'"),
    (
        {'shapes': [{'kind': 'disk', 'radius': 1, 'shapes': []}]},
        'shapes[0].shapes',
        "is not a known parameter with kind 'disk'",
    ),
    (
        {'shapes': [{'kind': 'group', 'shapes': [], 'radius': 1}]},
        'shapes[0].radius',
        "is not a known parameter with kind 'group'",
    ),
    (
        {'shapes': [{'kind': 'group', 'shapes': [{'kind': 'group', 'shapes': [{'kind': 'disk', 'radius': 'a'}]}]}]},
        'shapes[0].shapes[0].shapes[0].radius',
        'must be a valid integer',
    ),
]


@pytest.mark.parametrize(('body', 'field', 'problem'), REFUSED)
def test_errors_have_the_paths_of_the_document(body: dict[str, Any], field: str, problem: str) -> None:
    """The path of an error does not contain tags, at any depth, and the message says what is accepted."""
    with pytest.raises(InvalidField) as caught:
        read_model(Drawing, body)
    assert (caught.value.field, caught.value.violations[0].problem) == (field, problem)
