"""Tests that changes in the settings under which operations are replayed are detected."""

from pathlib import Path

from twinkle_services.model.backends.journal.environment import changed_environment


def test_changes_are_returned_once(tmp_path: Path) -> None:
    """Changed settings are returned with their old and new values, only by the first call after the change."""
    assert changed_environment(tmp_path, {'pass_tokens': 1024, 'device': 'cpu'}) == {}
    assert changed_environment(tmp_path, {'pass_tokens': 512, 'device': 'cpu'}) == {'pass_tokens': '1024 -> 512'}
    assert changed_environment(tmp_path, {'pass_tokens': 512, 'device': 'cpu'}) == {}


def test_damaged_environment_file_is_ignored(tmp_path: Path) -> None:
    """No setting counts as changed if the environment file is damaged."""
    (tmp_path / 'circumstances.json').write_text('{')
    assert changed_environment(tmp_path, {'device': 'cpu'}) == {}
