"""Custom components of at most ten lines each; their examples run as described."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(240)
ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / 'examples' / 'own_components'
COMPONENTS = ('advantage', 'loss', 'metric', 'preprocessor', 'reward', 'template')


def run(name: str) -> dict[str, str]:
    """Run an example, and return its output lines by the text before the first colon."""
    done = subprocess.run(
        [sys.executable, '-m', f'examples.own_components.{name}'],
        cwd=ROOT,
        env={**os.environ, 'OMP_NUM_THREADS': '1'},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(line.split(': ', 1) for line in done.stdout.splitlines())


@pytest.mark.parametrize('name', COMPONENTS)
def test_a_component_takes_ten_lines(name: str) -> None:
    """The class in each example has at most ten lines, without docstrings and empty lines."""
    text = (FOLDER / f'{name}.py').read_text()
    (component,) = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    prose = {
        line
        for node in ast.walk(component)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for line in range(node.lineno, (node.end_lineno or 0) + 1)
    }
    lines = range(component.lineno, (component.end_lineno or 0) + 1)
    assert len([line for line in lines if line not in prose and text.splitlines()[line - 1].strip()]) <= 10


def test_custom_loss_falls() -> None:
    """The custom loss, as a class, an object or a name, falls; a higher focus gives a lower first loss."""
    losses = {way: [float(number) for number in re.findall(r'[\d.]+', line)] for way, line in run('loss').items()}
    assert set(losses) == {'class', 'object', 'name'}
    assert all(last < first for first, last in losses.values())
    assert losses['class'][0] > losses['name'][0] > losses['object'][0]


@pytest.mark.slow
def test_custom_perplexity_falls() -> None:
    """The custom perplexity falls from round to round, in training and in evaluation."""
    rounds = [[float(number) for number in re.findall(r'[\d.]+', line)] for line in run('metric').values()]
    assert len(rounds) == 3
    for values in zip(*rounds, strict=True):
        assert values[0] > values[1] > values[2] > 1


def test_custom_reward_prefers_short_answers() -> None:
    """The custom reward prefers short answers; with a higher price per word, long answers get no reward."""
    scores = run('reward')
    assert scores == {'class': '[1.0, 0.0, 0.0]', 'object': '[1.0, 0.5, 0.0]', 'name': '[1.0, 0.5, 0.0]'}


def test_custom_advantage_subtracts_the_median() -> None:
    """The custom advantage uses a baseline that a single lucky completion does not change."""
    expected = str([0.0, 0.0, 0.0, 1.0, -0.25, -0.25, 0.25, 0.25])
    assert run('advantage') == {'class': expected, 'object': expected, 'name': expected}


def test_custom_preprocessor_converts_rows() -> None:
    """The custom preprocessor, as a class, an object or a function, converts rows to chats."""
    assert set(run('preprocessor').values()) == {str(['Translate "cat" into French.', 'chat'])}


def test_custom_template_numbers_the_messages() -> None:
    """The text of the custom template is tokenized, and only the assistant's messages have labels."""
    for line in run('template').values():
        encoded, labelled = line.split(', labels ')
        assert '[1] Hello?' in encoded
        assert '[2] Who?' in encoded
        assert ast.literal_eval(labelled) == 'Hello.<|im_end|>Twinkle.<|im_end|>'
