"""Runs the examples of docs/rewards.md."""

import re
from pathlib import Path

import pytest

from fixtures.sandbox import needs_walls
from twinkle.advantage import ADVANTAGES
from twinkle.reward import REWARDS

DOCUMENT = (Path(__file__).parents[3] / 'docs' / 'rewards.md').read_text(encoding='utf-8')
EXAMPLES = re.findall(r'^```python\n(.*?)^```$', DOCUMENT, re.MULTILINE | re.DOTALL)


MARKED = [pytest.param(text, marks=needs_walls if 'CodeExecution' in text else ()) for text in EXAMPLES]


@pytest.mark.parametrize('example', MARKED, ids=range(len(EXAMPLES)))
def test_example_runs(example: str) -> None:
    """Each example runs in isolation and its assertions hold."""
    exec(compile(example, 'docs/rewards.md', 'exec'), {})


def test_the_document_names_every_component() -> None:
    """The document names every reward and advantage, except for two abbreviated names, and has five examples."""
    shortened = {'OlympiadBenchFormatReward', 'OlympiadBenchQualityReward'}
    names = {*REWARDS.names, *ADVANTAGES.names} - shortened
    assert sorted(name for name in names if name not in DOCUMENT) == []
    assert len(EXAMPLES) == 5
