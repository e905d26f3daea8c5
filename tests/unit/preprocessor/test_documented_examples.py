"""What docs/preprocessing.md shows is what happens."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

from twinkle.preprocessor import filter_names, preprocessor_names

PAGE = Path(__file__).parents[3] / 'docs/preprocessing.md'
BLOCK = re.compile(r'^```python\n(.*?)^```', re.MULTILINE | re.DOTALL)
PRINTED = re.compile(r'^print\(.*\)  # (.*)$', re.MULTILINE)


def test_examples_print_what_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks run in order, and each `print` gives what stands behind it."""
    monkeypatch.chdir(tmp_path)
    program = '\n'.join(BLOCK.findall(PAGE.read_text(encoding='utf-8')))
    names: dict[str, Any] = {'__name__': 'example'}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(program, str(PAGE), 'exec'), names)
    assert printed.getvalue().splitlines() == PRINTED.findall(program)
    assert len((tmp_path / 'dropped.jsonl').read_text().splitlines()) == 3


def test_the_page_names_everything_there_is() -> None:
    """Whoever adds a preprocessor or filter of chats tells of it."""
    page = PAGE.read_text(encoding='utf-8')
    missing = [name for name in (*preprocessor_names(), *filter_names()) if f'`{name}' not in page]
    assert missing == []
