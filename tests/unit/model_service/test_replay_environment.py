"""A journal that is taken up under other circumstances says so once."""

from pathlib import Path

from services.model.backends.journal.environment import changed_environment


def test_changes_are_told_once(tmp_path: Path) -> None:
    """What differs is named with both values; the next start under the same circumstances is calm."""
    assert changed_environment(tmp_path, {'pass_tokens': 1024, 'device': 'cpu'}) == {}
    assert changed_environment(tmp_path, {'pass_tokens': 512, 'device': 'cpu'}) == {'pass_tokens': '1024 -> 512'}
    assert changed_environment(tmp_path, {'pass_tokens': 512, 'device': 'cpu'}) == {}


def test_a_damaged_file_is_no_reason_to_stop(tmp_path: Path) -> None:
    """It holds nothing that is needed."""
    (tmp_path / 'circumstances.json').write_text('{')
    assert changed_environment(tmp_path, {'device': 'cpu'}) == {}
