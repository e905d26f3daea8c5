"""Tests of the rules that decide whether the curve of a recipe shows learning."""

import csv
import json
import random
from pathlib import Path

import pytest

from e2e.cookbook.corpus import MARKETS, write_corpus
from e2e.cookbook.judging import judge, read_curve
from e2e.cookbook.recipes import RECIPES
from e2e.cookbook.report import Result


def noisy(*means: float, spread: float = 0.05, seed: int = 1) -> list[float]:
    """Return curve values with these means and uniform noise."""
    rng = random.Random(seed)
    return [mean + rng.uniform(-spread, spread) for mean in means]


def test_falling_loss_is_learning() -> None:
    """A loss whose mean is lower over the last steps than over the first steps counts as learning."""
    verdict = judge([3.0, 3.0, 2.9, 2.5, 2.0, 1.5, 1.0, 1.0, 0.9], is_rising=False)
    assert verdict.compared == 3
    assert (verdict.first, verdict.last) == pytest.approx((8.9 / 3, 2.9 / 3))
    assert verdict.has_learned


def test_curve_in_the_wrong_direction_is_not_learning() -> None:
    """A rising curve counts as learning for a reward, but not for a loss."""
    curve = noisy(*[0.1] * 5, *[0.9] * 5)
    assert judge(curve, is_rising=True).has_learned
    assert not judge(curve, is_rising=False).has_learned


def test_difference_within_the_noise_is_not_learning() -> None:
    """A change of the mean by less than two standard errors does not count as learning."""
    verdict = judge([0.1, 0.5, 0.3, 0.3, 0.4, 0.3, 0.2, 0.6, 0.3], is_rising=True)
    assert verdict.last > verdict.first
    assert not verdict.has_learned


def test_noise_alone_rarely_counts_as_learning() -> None:
    """Fewer than 20 of 200 flat curves change by more than two standard errors by chance."""
    count = sum(judge(noisy(*[0.5] * 12, seed=seed), is_rising=True).has_learned for seed in range(200))
    assert count < 20


def test_constant_curve_is_not_learning() -> None:
    """Constant rewards, for example of a model whose samples are all wrong, do not count as learning."""
    assert not judge([-0.1] * 9, is_rising=True).has_learned


def test_short_curve_is_refused() -> None:
    """A curve of eight steps raises an error, and a recipe with a short curve has not passed."""
    with pytest.raises(ValueError, match='8 steps'):
        judge([3.0, 2.0, 1.0, 0.5, 0.1, 0.1, 0.1, 0.1], is_rising=False)
    short = Result(recipe='sl_loop', status=0, seconds=1.0, engine='torch', metric='loss', curve=[3.0, 1.0])
    assert not short.has_passed


def test_failed_recipe_has_not_passed() -> None:
    """A recipe that failed or exceeded its time limit has not passed, even if its curve shows learning."""
    curve = noisy(*[3.0] * 5, *[1.0] * 5)
    for status in (1, None):
        assert not Result(
            recipe='sl_loop', status=status, seconds=1, engine='torch', metric='l', curve=curve
        ).has_passed
    assert Result(recipe='sl_loop', status=0, seconds=1, engine='torch', metric='l', curve=curve).has_passed


def test_read_curve_skips_steps_without_the_metric(tmp_path: Path) -> None:
    """The curve has no value for a line without the metric, and it is empty if the file does not exist."""
    rows = [{'step': 0, 'loss': 2.0}, {'step': 1, 'loss': 1.0}, {'step': 2, 'tokens': 7}]
    log = tmp_path / 'metrics.jsonl'
    log.write_text(''.join(f'{json.dumps(row)}\n' for row in rows))
    assert read_curve(log, 'loss') == [2.0, 1.0]
    assert read_curve(tmp_path / 'none', 'loss') == []


def test_initial_recipe_runs_first() -> None:
    """A recipe that provides initial weights precedes the recipes that use them."""
    names = list(RECIPES)
    for name, recipe in RECIPES.items():
        assert not recipe.initial_recipe or names.index(recipe.initial_recipe) < names.index(name)


def test_datasets_are_deterministic(tmp_path: Path) -> None:
    """Two calls write equal files, with the rows and columns that the recipes read."""
    for folder in (tmp_path / 'one', tmp_path / 'two'):
        write_corpus(folder, conversations=9, problems=5, preferences=3, markets=4)
    sizes = {
        'HuggingFaceH4/no_robots': (9, {'messages'}),
        'openai/gsm8k/main': (5, {'question', 'answer'}),
        'Anthropic/hh-rlhf': (3, {'chosen', 'rejected'}),
    }
    for name, (count, columns) in sizes.items():
        text = (tmp_path / 'one' / name / 'train.jsonl').read_text()
        rows = [json.loads(line) for line in text.splitlines()]
        assert len(rows) == count
        assert all(set(row) == columns for row in rows)
        assert text == (tmp_path / 'two' / name / 'train.jsonl').read_text()
    markets = (tmp_path / 'one' / MARKETS).read_text()
    assert markets == (tmp_path / 'two' / MARKETS).read_text()
    assert sum(row['close_time'] < '2026' for row in csv.DictReader(markets.splitlines())) == 4
