"""The examples in docs/preprocessing.md give the documented output."""

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


def test_examples_print_the_documented_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All code blocks run in order, and each `print` gives the output in its comment."""
    monkeypatch.chdir(tmp_path)
    program = '\n'.join(BLOCK.findall(PAGE.read_text(encoding='utf-8')))
    names: dict[str, Any] = {'__name__': 'example'}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(program, str(PAGE), 'exec'), names)
    assert printed.getvalue().splitlines() == PRINTED.findall(program)
    assert len((tmp_path / 'dropped.jsonl').read_text().splitlines()) == 3


def test_the_page_names_all_preprocessors_and_filters() -> None:
    """The document names every registered preprocessor and filter."""
    page = PAGE.read_text(encoding='utf-8')
    missing = [name for name in (*preprocessor_names(), *filter_names()) if f'`{name}' not in page]
    assert missing == []
