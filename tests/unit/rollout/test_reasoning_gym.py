"""Unit tests of reasoning-gym tasks as environments, with a fake dataset."""

import importlib.util
from typing import Any

import pytest

from fixtures.letter_environments import Sums
from twinkle.component import MissingLibrary
from twinkle.data_format import user_data_get
from twinkle.rollout import TaskEnv, load_tasks, task_chats, task_envs


class Puzzles(Sums):
    """Tasks that have many correct answers and do not list them."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**super().__getitem__(index), 'answer': None}


def test_a_task_without_an_answer_has_no_ground_truth():
    """The chat of a task without an answer has no `ground_truth`."""
    assert user_data_get(next(task_chats(Puzzles())), 'ground_truth', 'absent') == 'absent'


def test_each_task_becomes_a_chat():
    """The chats are in task order, and contain the correct answers for rewards."""
    chats = list(task_chats(Sums(), system='Answer.'))
    assert [chat['messages'][-1]['content'] for chat in chats] == [f'What is {index} + 1?' for index in range(3)]
    assert [user_data_get(chat, 'ground_truth') for chat in chats] == ['1', '2', '3']
    assert chats[0]['messages'][0] == {'role': 'system', 'content': 'Answer.'}
    assert len(next(task_chats(Sums(), system=''))['messages']) == 1


@pytest.mark.parametrize(
    ('text', 'reward', 'has_answer'),
    [
        ('so <answer> 2 </answer>', 1.0, 1.0),
        ('<answer>3</answer> no, <answer>\n2\n</answer>', 1.0, 1.0),
        ('<answer>3</answer>', 0.25, 1.0),
        ('2', 0.0, 0.0),
        ('<answer>2', 0.0, 0.0),
    ],
)
def test_the_last_answer_is_scored_by_the_task(text, reward, has_answer):
    """The last answer element of a message is scored, and the chat ends."""
    env = task_envs(Sums())()
    env.reset(list(task_chats(Sums()))[1], seed=None)
    step = env.step({'role': 'assistant', 'content': text}, is_last=False)
    assert (step.reward, step.is_done, step.facts) == (reward, True, {'has_answer': has_answer})
    env.close()


@pytest.mark.parametrize('data', [[], [('reasoning_gym_index', '7')], [('reasoning_gym_index', '"1"')]])
def test_a_chat_without_a_task_is_refused(data):
    """A missing, too large or non-numeric task index raises ValueError."""
    with pytest.raises(ValueError):  # noqa: PT011 (a malformed field)
        TaskEnv(Sums()).reset({'messages': [], 'user_data': data}, seed=None)


@pytest.mark.skipif(importlib.util.find_spec('reasoning_gym') is not None, reason='reasoning-gym is installed')
def test_a_missing_library_is_reported():
    """Loading tasks without reasoning-gym raises a MissingLibrary that names the library."""
    with pytest.raises(MissingLibrary) as caught:
        load_tasks('leg_counting', size=1, seed=1)
    assert (caught.value.library, caught.value.install) == ('reasoning-gym', 'twinkle-grpc[reasoning-gym]')


@pytest.mark.skipif(importlib.util.find_spec('reasoning_gym') is None, reason='reasoning-gym is not installed')
def test_tasks_of_the_library_score_their_own_answers():
    """A seed determines the tasks, and a task's listed answer gets the full score."""
    tasks, repeated = (load_tasks('leg_counting', size=3, seed=7) for _ in range(2))
    for index, chat in enumerate(task_chats(tasks)):
        assert tasks[index] == repeated[index]
        env = TaskEnv(tasks)
        env.reset(chat, seed=None)
        answer = f'<answer>{tasks[index]["answer"]}</answer>'
        assert env.step({'role': 'assistant', 'content': answer}, is_last=True).reward == 1.0
