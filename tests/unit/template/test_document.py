"""The program of docs/templates.md, run as it stands, on a tiny tokenizer."""

import re
from pathlib import Path
from typing import Any

from fixtures.source_tree import ROOT
from fixtures.tiny_model import build_tiny_tokenizer


def test_the_program_runs_as_it_stands(tmp_path: Path) -> None:
    """What the document shows gives what it says."""
    blocks = re.findall(r'```python\n(.*?)```', (ROOT / 'docs/templates.md').read_text(), re.DOTALL)
    names: dict[str, Any] = {'MODEL': str(build_tiny_tokenizer(tmp_path))}
    exec(compile('\n'.join(blocks), 'docs/templates.md', 'exec'), names)
    assert [call['function'] for call in names['calls']] == [{'name': 'add', 'arguments': {'a': 1, 'b': 2}}]
    assert names['text'] == 'So.'
    assert names['template'].decode(names['feature']['input_ids']).endswith(names['said'])
    assert names['problem'] is not None
