"""Matching of requested names with served base models, and removal of folders from messages."""

import pytest

from twinkle_services.gateway.fleet.model_routes import served_name, shown_text


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


@pytest.mark.parametrize(
    ('text', 'expected'),
    [
        ('weights that fit /srv/models/tiny on this engine', 'weights that fit tiny on this engine'),
        ("has base model '/srv/my models/tiny'; this", "has base model 'tiny'; this"),
        ("available: ('~/tiny', './a/b', '../c', 'org/tiny')", "available: ('tiny', 'b', 'c', 'org/tiny')"),
        ('must be tinker://{run}/{kind}/{name}, 1/2 or a / b', 'must be tinker://{run}/{kind}/{name}, 1/2 or a / b'),
        ("no weights 'tinker://se-1:train:0/weights/best'", "no weights 'tinker://se-1:train:0/weights/best'"),
    ],
)
def test_messages_contain_no_folder(text: str, expected: str) -> None:
    """Folders in a message are replaced by their last component; paths of weights and hub ids stay unchanged."""
    assert shown_text(text) == expected
