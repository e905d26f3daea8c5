"""Tasks of reasoning-gym as environments; the library is optional and loaded when one is made."""

import importlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from twinkle.component import MissingLibrary
from twinkle.data_format import Message, Trajectory, pack_value, user_data_get
from twinkle.rollout.env import EnvFactory, EnvStep

_INDEX = 'reasoning_gym_index'
_ANSWER = re.compile(r'<answer>\s*(.*?)\s*</answer>', re.DOTALL)
_ASKED_FORM = 'Think step by step. Put your final answer, and nothing else, between <answer> and </answer>.'


class TaskSet(Protocol):
    """What the room needs of a reasoning-gym dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]:
        """Return a task: `question`, `answer` and what scoring needs."""
        ...

    def score_answer(self, answer: str | None, entry: Any) -> float:
        """Return how good an answer is, in [0, 1]."""
        ...


def load_tasks(name: str, *, size: int, seed: int, **options: Any) -> TaskSet:
    """Return a reasoning-gym dataset, such as 'leg_counting'; its tasks are a function of name, seed and options.

    Raises:
        MissingLibrary: reasoning-gym is not installed.
        ValueError: the library knows no such dataset or refuses an option.
    """
    try:
        library = importlib.import_module('reasoning_gym')
    except ImportError as error:
        raise MissingLibrary('reasoning-gym', 'reasoning-gym') from error
    return library.create_dataset(name, size=size, seed=seed, **options)


def task_chats(tasks: TaskSet, *, system: str = _ASKED_FORM) -> Iterator[Trajectory]:
    """Yield a chat for each task, in order; `user_data` names the task and its `ground_truth`, where it has one.

    Args:
        tasks: a reasoning-gym dataset.
        system: the system message, which says where the answer goes. Empty: none.
    """
    opening: list[Message] = [{'role': 'system', 'content': system}] if system else []
    for index in range(len(tasks)):
        task = tasks[index]
        question: Message = {'role': 'user', 'content': str(task['question'])}
        data = [pack_value(_INDEX, index)]
        # Some puzzles have many right answers and name none; their scorer knows.
        if task.get('answer') is not None:
            data.append(pack_value('ground_truth', str(task['answer'])))
        yield {'messages': [*opening, question], 'user_data': data}


class TaskEnv:
    """Scores the model's first turn with the task's own scorer.

    The answer is what stands in the last `<answer>`; without one the scorer is given none.

    Args:
        tasks: a reasoning-gym dataset. Chats are those of `task_chats` of the same one.
    """

    def __init__(self, tasks: TaskSet) -> None:
        self._tasks = tasks
        self._task: Mapping[str, Any] = {}

    def reset(self, trajectory: Trajectory, *, seed: int | None) -> Trajectory:
        """Return the chat as it is, its task found.

        Raises:
            ValueError: the chat names no task of the dataset.
        """
        del seed
        index = user_data_get(trajectory, _INDEX)
        if not isinstance(index, int) or not 0 <= index < len(self._tasks):
            raise ValueError(f'user_data.{_INDEX} must be 0 to {len(self._tasks) - 1}, got {index!r}; use task_chats')
        self._task = self._tasks[index]
        return trajectory

    def step(self, message: Message, *, is_last: bool) -> EnvStep:
        """Score the answer and end."""
        del is_last
        answers = _ANSWER.findall(str(message.get('content', '')))
        score = float(self._tasks.score_answer(answers[-1] if answers else None, self._task))
        return EnvStep(reward=score, is_done=True, facts={'has_answer': float(bool(answers))})

    def close(self) -> None:
        """Hold nothing."""


def task_envs(tasks: TaskSet) -> EnvFactory:
    """Return what makes environments of a dataset's tasks, for `MultiTurnRollout(env=...)`."""
    return lambda: TaskEnv(tasks)
