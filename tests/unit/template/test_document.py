"""The programs in docs/templates.md run without changes on tiny models."""

import re
from pathlib import Path
from typing import Any

from fixtures.source_tree import ROOT
from fixtures.tiny_model import build_tiny_tokenizer
from fixtures.tiny_vision import build_tiny_vision


def test_the_documented_program_runs(tmp_path: Path) -> None:
    """The documented program gives the documented results."""
    blocks = re.findall(r'```python\n(.*?)```', (ROOT / 'docs/templates.md').read_text(), re.DOTALL)
    models = {'MODEL': build_tiny_tokenizer(tmp_path / 'text'), 'VISION_MODEL': build_tiny_vision(tmp_path / 'vision')}
    names: dict[str, Any] = {name: str(folder) for name, folder in models.items()}
    exec(compile('\n'.join(blocks), 'docs/templates.md', 'exec'), names)
    assert [call['function'] for call in names['calls']] == [{'name': 'add', 'arguments': {'a': 1, 'b': 2}}]
    assert names['text'] == 'So.'
    assert names['template'].decode(names['feature']['input_ids']).endswith(names['answer'])
    assert names['problem'] is not None
    assert names['image_feature']['pixel_values'].tobytes() == names['same_feature']['pixel_values'].tobytes()
    assert list(names['video_feature']['video_grid_thw'][0]) == [1, 6, 6]
