"""The reward of the quick start's countdown program, on data from the data service and the sampler."""

import ast
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fixtures.source_tree import ROOT
from twinkle.data_format import SampledSequence, StopReason
from twinkle.preprocessor import CountdownProcessor
from twinkle.reward import Reward
from twinkle_client.convert import trajectory_from_proto
from twinkle_client.sampler.results import completion_feature
from twinkle_services.data.api.convert_chats import trajectory_of_row

PROGRAMS = ROOT / 'tests' / 'e2e' / 'seeds' / 'programs'


@pytest.mark.parametrize('language', ['english', 'chinese'])
def test_only_correct_answers_score_one(language: str) -> None:
    """The program's reward receives target and numbers, and gives zero for a wrong number or a wrong result."""
    reward = _countdown_reward((PROGRAMS / language / 'client_grpo.txt').read_text())
    answers = ['(1 + 2) * 3', '1 + 2 + 3', '1 + 2 + 6', '9', '']
    features = [_feature_of({'target': 9, 'nums': [1, 2, 3]}, f'<answer>{answer}</answer>') for answer in answers]
    assert reward(features, []) == [1.0, 0.0, 0.0, 0.0, 0.0]


def _countdown_reward(program: str) -> Callable[..., list[float]]:
    """Return an object of the class that the program defines, without running the rest of the program."""
    tree = ast.parse(program)
    tree.body = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == 'CountDownAccuracy']
    names: dict[str, Any] = {'Reward': Reward, 're': re, 'List': list, 'Trajectory': dict}
    exec(compile(tree, 'client_grpo', 'exec'), names)
    return names['CountDownAccuracy']()


def _feature_of(game: dict[str, Any], completion: str) -> dict[str, Any]:
    """Return the feature of a completion in the form that the client returns."""
    chat: Any = trajectory_from_proto(trajectory_of_row(CountdownProcessor().convert(game)))
    prompt = {'input_ids': [1], 'messages': chat['messages'], 'user_data': chat['user_data']}
    sequence = SampledSequence(stop_reason=StopReason.STOP, tokens=[5], logprobs=[[(5, -0.5)]], decoded=completion)
    feature: Any = completion_feature(prompt, np.array([1], dtype=np.int32), sequence)
    return feature
