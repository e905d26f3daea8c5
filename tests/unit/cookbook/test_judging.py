"""When a curve of a recipe counts as learning."""

import json
import random
from pathlib import Path

import pytest

from e2e.cookbook.corpus import write_corpus
from e2e.cookbook.judging import judge, read_curve
from e2e.cookbook.recipes import RECIPES
from e2e.cookbook.report import Result


def noisy(*means: float, spread: float = 0.05, seed: int = 1) -> list[float]:
    """Return means with noise."""
    rng = random.Random(seed)
    return [mean + rng.uniform(-spread, spread) for mean in means]


def test_a_loss_that_falls_is_learning() -> None:
    """The two ends are means of steps, and what lies between does not count."""
    verdict = judge([3.0, 3.0, 2.9, 2.5, 2.0, 1.5, 1.0, 1.0, 0.9], is_rising=False)
    assert verdict.compared == 3
    assert (verdict.first, verdict.last) == pytest.approx((8.9 / 3, 2.9 / 3))
    assert verdict.has_learned


def test_a_curve_in_the_wrong_direction_is_none() -> None:
    """A loss that rises is none, and the same curve as a reward is."""
    curve = noisy(*[0.1] * 5, *[0.9] * 5)
    assert judge(curve, is_rising=True).has_learned
    assert not judge(curve, is_rising=False).has_learned


def test_a_difference_within_the_noise_is_none() -> None:
    """The mean has moved by less than twice its standard error."""
    verdict = judge([0.1, 0.5, 0.3, 0.3, 0.4, 0.3, 0.2, 0.6, 0.3], is_rising=True)
    assert verdict.last > verdict.first
    assert not verdict.has_learned


def test_noise_alone_is_seldom_taken_for_learning() -> None:
    """Of two hundred flat curves few seem to rise: two standard errors are crossed by chance now and then."""
    seeming = sum(judge(noisy(*[0.5] * 12, seed=seed), is_rising=True).has_learned for seed in range(200))
    assert seeming < 20


def test_a_curve_that_does_not_move_is_none() -> None:
    """Constant rewards, as of a model whose samples are all wrong, are not learning."""
    assert not judge([-0.1] * 9, is_rising=True).has_learned


def test_a_curve_too_short_to_tell_is_refused() -> None:
    """And a recipe that logged so little has not learned, even where it ended well."""
    with pytest.raises(ValueError, match='8 steps'):
        judge([3.0, 2.0, 1.0, 0.5, 0.1, 0.1, 0.1, 0.1], is_rising=False)
    short = Result(recipe='sl_loop', status=0, seconds=1.0, engine='torch', metric='loss', curve=[3.0, 1.0])
    assert not short.is_good


def test_a_recipe_that_failed_is_not_good_however_its_curve_looks() -> None:
    """Nor is one whose time was over."""
    curve = noisy(*[3.0] * 5, *[1.0] * 5)
    for status in (1, None):
        assert not Result(recipe='sl_loop', status=status, seconds=1, engine='torch', metric='l', curve=curve).is_good
    assert Result(recipe='sl_loop', status=0, seconds=1, engine='torch', metric='l', curve=curve).is_good


def test_steps_that_do_not_report_a_metric_are_left_out(tmp_path: Path) -> None:
    """A recipe's last line has totals alone; a recipe that failed at once wrote no file."""
    rows = [{'step': 0, 'loss': 2.0}, {'step': 1, 'loss': 1.0}, {'step': 2, 'tokens': 7}]
    log = tmp_path / 'metrics.jsonl'
    log.write_text(''.join(f'{json.dumps(row)}\n' for row in rows))
    assert read_curve(log, 'loss') == [2.0, 1.0]
    assert read_curve(tmp_path / 'none', 'loss') == []


def test_every_recipe_begins_from_one_that_runs_before_it() -> None:
    """Weights are there when they are wanted."""
    names = list(RECIPES)
    for name, recipe in RECIPES.items():
        assert not recipe.begins_from or names.index(recipe.begins_from) < names.index(name)


def test_data_sets_are_the_same_every_time(tmp_path: Path) -> None:
    """Each has the rows and columns that its recipes read."""
    for folder in (tmp_path / 'one', tmp_path / 'two'):
        write_corpus(folder, conversations=9, problems=5, preferences=3)
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
