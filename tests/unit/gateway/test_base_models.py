"""Which base model a client means by a name."""

import pytest

from services.gateway.fleet.base_models import served_name


@pytest.mark.parametrize(
    ('name', 'served', 'meant'),
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
def test_id_without_its_hub_means_the_one_that_is_served(name: str, served: list[str], meant: str | None) -> None:
    """The same name comes first; two hubs are two models; what could be several is none."""
    assert served_name(name, served) == meant
