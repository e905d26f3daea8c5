"""Unit tests of the recorded curves of recipes, and of the option `--track`."""

import argparse
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from examples.cookbook.curves import Curves
from examples.cookbook.draw_seeds import labels_of
from examples.cookbook.recipe import Recipe, trackers


@dataclass(frozen=True)
class Setting:
    """Sizes of a recipe."""

    steps: int = 2


class FakeMetrics:
    """Store of a run's metrics in the services."""

    run_id = 'ad-1'

    def __init__(self) -> None:
        self.points: dict[tuple[str, int], float] = {}

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Store values."""
        self.points |= {(name, step): value for name, value in values.items()}


def curves_of(out: Path, **options) -> Curves:
    """Return curves of a run with seed 3 that plots the loss."""
    recipe = Recipe(name='dpo', setting=Setting(), seed=3, out=out, trackers=['jsonl'])
    return Curves(recipe, title='DPO', total_steps=2, plotted=['loss'], **options)


def test_numbers_reach_the_file_and_the_store_of_the_services(tmp_path):
    """Each step becomes a line of `curves.jsonl`, and points of the run in the services."""
    metrics = FakeMetrics()
    with curves_of(tmp_path, metrics=metrics) as curves:
        curves.record(loss=2.0)
        curves.record(loss=1.0, margin=0.5)
    lines = [json.loads(line) for line in (tmp_path / 'curves.jsonl').read_text().splitlines()]
    assert lines == curves.steps == [{'step': 0, 'loss': 2.0}, {'step': 1, 'loss': 1.0, 'margin': 0.5}]
    assert metrics.points == {('loss', 0): 2.0, ('loss', 1): 1.0, ('margin', 1): 0.5}
    assert (tmp_path / 'curves.png').exists()


def test_the_description_has_the_setting_and_the_status(tmp_path):
    """A run replaces the files of an earlier run; the status of an interrupted run is an interrupt."""
    with curves_of(tmp_path) as curves:
        curves.record(loss=2.0)
        curves.record(loss=1.0)
    assert json.loads((tmp_path / 'curves.json').read_text())['status'] == 'finished'
    with suppress(KeyboardInterrupt), curves_of(tmp_path) as curves:
        curves.record(loss=1.0)
        raise KeyboardInterrupt
    description = json.loads((tmp_path / 'curves.json').read_text())
    assert (description['project'], description['name']) == ('cookbook-dpo', 'DPO')
    assert description['config'] == {'seed': 3, 'steps': 2}
    assert description['status'] == 'interrupted'
    assert len((tmp_path / 'curves.jsonl').read_text().splitlines()) == 1


def test_names_of_trackers_are_checked_on_the_command_line():
    """Known trackers are accepted; an unknown tracker is an error before a recipe starts."""
    assert trackers('jsonl') == ['jsonl']
    with pytest.raises(argparse.ArgumentTypeError, match="unknown tracker 'wandbb'"):
        trackers('jsonl,wandbb')
    with pytest.raises(argparse.ArgumentTypeError, match="leave out 'service'"):
        trackers('service')


def test_files_of_several_folders_have_different_labels() -> None:
    """A plot of several seeds has one line for each file, even if the files have equal names."""
    assert labels_of([Path('ppo_seed0.jsonl'), Path('ppo_seed1.jsonl')]) == ['seed0', 'seed1']
    assert labels_of([Path('a/curves.jsonl'), Path('b/curves.jsonl')]) == ['a/curves.jsonl', 'b/curves.jsonl']
