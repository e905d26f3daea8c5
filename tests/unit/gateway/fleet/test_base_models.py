"""Matching the base model name of a request to the served base models."""

import pytest

from services.gateway.fleet.model_routes import served_name


@pytest.mark.parametrize(
    ('name', 'served', 'expected'),
    [
        ('ms://org/a', ['org/b', 'ms://org/a'], 'ms://org/a'),
        ('org/a', ['ms://org/a'], 'ms://org/a'),
        ('ms://org/a', ['org/a'], 'org/a'),
        ('org/a', ['ms://org/a', 'org/a'], 'org/a'),
        ('org/a', ['ms://org/a', 'hf://org/a'], None),
        ('hf://org/a', ['ms://org/a'], None),
        ('hf://org/a', ['ms://org/a', 'org/a'], 'org/a'),
        ('org/c', ['org/a', 'ms://org/b'], None),
    ],
)
def test_model_name_without_a_hub_matches_the_served_model(name: str, served: list[str], expected: str | None) -> None:
    """An equal name is preferred, names of different hubs differ, and an ambiguous name matches no model."""
    assert served_name(name, served) == expected
