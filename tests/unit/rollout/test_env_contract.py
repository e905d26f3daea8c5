"""The contract of environments, for the environments that need no other library."""

from typing import Any

import pytest

from fixtures.env_contract import check_env
from fixtures.letter_environments import LetterEnvironment, LetterProgram, RunningPrograms, Sums
from twinkle.data_format import pack_value
from twinkle.rollout import EnvFactory, SingleTurn, ToolEnv, ToolManager, openenv_envs, task_chats, task_envs

CHAT: Any = {'messages': [{'role': 'user', 'content': 'hi'}], 'user_data': [pack_value('number', 3)]}


def no_calls(text: str) -> list[Any]:
    """Find no call."""
    del text
    return []


FACTORIES: dict[str, EnvFactory] = {
    'single turn': SingleTurn,
    'tools': lambda: ToolEnv(ToolManager([]), no_calls),
    'openenv': openenv_envs(LetterEnvironment, observe=lambda observation: observation.text, act=str),
}


@pytest.mark.parametrize('name', FACTORIES)
def test_environment_keeps_the_contract(name: str) -> None:
    """The chat is begun and ended as `Env` describes."""
    check_env(FACTORIES[name], CHAT, answer='ab12')


def test_tasks_keep_the_contract() -> None:
    """The environment of a task scores the answer in its only turn."""
    (step,) = check_env(task_envs(Sums()), next(task_chats(Sums())), answer='<answer>1</answer>')
    assert step.reward == 1.0


def test_programs_keep_the_contract() -> None:
    """The chat of a program ends with its reward, and is scored if the model has no turn left."""
    with RunningPrograms(LetterProgram) as envs:
        steps = check_env(envs, CHAT, answer='ab12')
    assert [step.reward for step in steps] == [0.0, 0.5]
