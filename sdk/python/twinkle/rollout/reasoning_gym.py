"""Tasks of the optional library reasoning-gym as rollout environments."""

import importlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from twinkle.component import MissingLibrary
from twinkle.data_format import Message, Trajectory, pack_value, user_data_get
from twinkle.rollout.env import EnvFactory, EnvStep

_INDEX = 'reasoning_gym_index'
_ANSWER = re.compile(r'<answer>\s*(.*?)\s*</answer>', re.DOTALL)
_ANSWER_FORMAT = 'Think step by step. Put your final answer, and nothing else, between <answer> and </answer>.'


class TaskSet(Protocol):
    """The part of a reasoning-gym dataset that rollouts use."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]:
        """Return a task: a mapping with `question`, `answer` and the scorer's data."""
        ...

    def score_answer(self, answer: str | None, entry: Any) -> float:
        """Return the score of an answer, in [0, 1]."""
        ...


def load_tasks(name: str, *, size: int, seed: int, **options: Any) -> TaskSet:
    """Create a reasoning-gym dataset, such as 'leg_counting'. Its tasks depend only on the arguments.

    Raises:
        MissingLibrary: reasoning-gym is not installed.
        ValueError: the dataset is unknown, or an option is invalid.
    """
    try:
        library = importlib.import_module('reasoning_gym')
    except ImportError as error:
        raise MissingLibrary('reasoning-gym', 'twinkle-grpc[reasoning-gym]') from error
    return library.create_dataset(name, size=size, seed=seed, **options)


def task_chats(tasks: TaskSet, *, system: str = _ANSWER_FORMAT) -> Iterator[Trajectory]:
    """Yield one chat per task, in order; `user_data` contains the task's index and, if known, its `ground_truth`.

    Args:
        tasks: a reasoning-gym dataset.
        system: system message, which describes the format of the answer. Empty: no system message.
    """
    opening: list[Message] = [{'role': 'system', 'content': system}] if system else []
    for index in range(len(tasks)):
        task = tasks[index]
        question: Message = {'role': 'user', 'content': str(task['question'])}
        data = [pack_value(_INDEX, index)]
        # Tasks with many correct answers do not list an answer; only their scorer can check a completion.
        if task.get('answer') is not None:
            data.append(pack_value('ground_truth', str(task['answer'])))
        yield {'messages': [*opening, question], 'user_data': data}


class TaskEnv:
    """Scores the model's first turn with the scorer of the task.

    The answer is the content of the last `<answer>` element. Without one, the scorer receives None.

    Args:
        tasks: a reasoning-gym dataset. The chats must come from `task_chats` of the same dataset.
    """

    def __init__(self, tasks: TaskSet) -> None:
        self._tasks = tasks
        self._task: Mapping[str, Any] = {}

    def reset(self, trajectory: Trajectory, *, seed: int | None) -> Trajectory:
        """Select the chat's task and return the chat unchanged.

        Raises:
            ValueError: `user_data` does not contain the index of a task in the dataset.
        """
        del seed
        index = user_data_get(trajectory, _INDEX)
        if not isinstance(index, int) or not 0 <= index < len(self._tasks):
            raise ValueError(f'user_data.{_INDEX} must be 0 to {len(self._tasks) - 1}, got {index!r}; use task_chats')
        self._task = self._tasks[index]
        return trajectory

    def step(self, message: Message, *, is_last: bool) -> EnvStep:
        """Score the answer and end the chat."""
        del is_last
        answers = _ANSWER.findall(str(message.get('content', '')))
        score = float(self._tasks.score_answer(answers[-1] if answers else None, self._task))
        return EnvStep(reward=score, is_done=True, facts={'has_answer': float(bool(answers))})

    def close(self) -> None:
        """Return immediately, because there are no resources to release."""


def task_envs(tasks: TaskSet) -> EnvFactory:
    """Return a factory of environments for a dataset's tasks, for `MultiTurnRollout(env=...)`."""
    return lambda: TaskEnv(tasks)
