"""Every recipe of the cookbook except `four_tenants` runs two steps on a tiny model.

The slow tests check that the recipes learn.
"""

import json
import math
from pathlib import Path

import pytest

from fixtures.recipe_runs import RecipeCall, run_in_one_process
from fixtures.tiny_model import build_tiny_model

pytestmark = pytest.mark.timeout(300)
HELD_OUT = ('--held-out', '1', '--eval-every', '2')
SHORT = {
    'async_rl': ('--steps', '2', '--prompts', '2', '--max-tokens', '4'),
    'dpo': ('--steps', '2', '--pairs', '2', '--held-out', '2', '--judge-every', '2'),
    'embedding': ('--steps', '2', '--pairs', '4', '--judge-every', '2'),
    'gkd': ('--steps', '2', '--prompts', '2', '--max-tokens', '4', '--top-k', '8'),
    'grpo_arithmetic': ('--steps', '2', '--prompts', '2', '--completions', '2', '--max-tokens', '4', *HELD_OUT),
    'grpo_countdown': ('--steps', '2', '--prompts', '2', '--completions', '2', '--max-tokens', '4', *HELD_OUT),
    'ppo': ('--steps', '2', '--prompts', '2', '--max-tokens', '4'),
    'pretraining': ('--steps', '2', '--pack-tokens', '64', '--held-out-packs', '2', '--evaluate-every', '2'),
    'sft_self_cognition': ('--examples', '16', '--epochs', '1'),
    'tool_use': ('--rounds', '2', '--prompts', '2', '--samples', '1', '--held-out', '1', '--held-out-samples', '1'),
    'vision_sft': ('--steps', '2', '--pictures', '8', '--held-out', '2', '--batch-size', '2', '--evaluate-every', '2'),
}
"""Options with which a recipe runs two short steps."""
MODEL_OPTIONS = {'gkd': ('--model', '--teacher'), 'vision_sft': ()}
"""Options for the model, for recipes that need options other than `--model`. The vision recipe builds its model."""


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with an output folder for each recipe, named after the recipe."""
    out = tmp_path_factory.mktemp('out')
    model = str(build_tiny_model(tmp_path_factory.mktemp('model')))
    calls: list[RecipeCall] = []
    for name, options in SHORT.items():
        models = [part for option in MODEL_OPTIONS.get(name, ('--model',)) for part in (option, model)]
        calls.append(RecipeCall(name, out / name, (*options, *models)))
    run_in_one_process(calls)
    return out


@pytest.mark.parametrize('name', SHORT)
def test_recipe_writes_finite_curves_of_two_steps(name: str, folder: Path) -> None:
    """A run of two steps writes a plot, and finite numbers for each step."""
    steps = [json.loads(line) for line in (folder / name / 'curves.jsonl').read_text().splitlines()]
    assert len(steps) >= 2
    assert (folder / name / 'curves.png').read_bytes().startswith(b'\x89PNG')
    numbers = [value for step in steps for value in step.values()]
    assert numbers
    assert [value for value in numbers if not math.isfinite(value)] == []


@pytest.mark.parametrize('name', ['async_rl', 'gkd', 'grpo_arithmetic', 'grpo_countdown', 'ppo', 'tool_use'])
def test_recipe_that_samples_writes_its_rollouts(name: str, folder: Path) -> None:
    """Each training step has rollouts with prompts, sampled tokens and, if the recipe has rewards, rewards."""
    rollouts = [json.loads(line) for line in (folder / name / 'curves.rollouts.jsonl').read_text().splitlines()]
    assert len({rollout['step'] for rollout in rollouts}) == 2
    for rollout in rollouts:
        assert rollout['prompt_messages'][-1]['role'] == 'user'
        assert len(rollout['token_ids']) == len(rollout['logprobs']) > 0
        assert ('reward' in rollout) is (name != 'gkd')
        assert ('advantage' in rollout or 'token_advantages' in rollout) is (name not in {'gkd', 'tool_use'})
