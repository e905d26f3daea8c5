"""Unit tests of OpenEnv's environments in rollouts, with an environment that has OpenEnv's interface."""

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest

from fixtures.letter_environments import LetterEnvironment
from twinkle.component import MissingLibrary
from twinkle.data_format import pack_value
from twinkle.rollout import OpenEnvEnv, VerifiersEnvs, load_verifiers, openenv_envs

CHAT: Any = {
    'messages': [{'role': 'system', 'content': 'Act.'}],
    'user_data': [pack_value('openenv_reset', {'word': 'Go.'})],
}


def act(text: str) -> str:
    """Return the action in a message; messages with digits have none."""
    if any(map(str.isdigit, text)):
        raise ValueError('digits are not allowed')
    return text


def env_of(environment: Any) -> OpenEnvEnv:
    """Return the environment of one chat."""
    return OpenEnvEnv(environment, observe=lambda observation: observation.text, act=act)


def test_observations_and_rewards_are_those_of_the_environment() -> None:
    """The first observation follows the given messages, `reset` gets its arguments, and actions are rewarded."""
    environment = LetterEnvironment()
    env = env_of(environment)
    chat = env.reset(CHAT, seed=5)
    assert [message['content'] for message in chat['messages']] == ['Act.', 'Go.']
    assert environment.seeds == [5]
    first = env.step({'role': 'assistant', 'content': 'ab!!'}, is_last=False)
    last = env.step({'role': 'assistant', 'content': 'abcd'}, is_last=False)
    assert (first.reward, first.is_done, first.messages[0]['content']) == (0.5, False, 'More.')
    assert (last.reward, last.is_done) == (1.0, True)
    env.close()
    assert environment.is_closed


def test_message_without_an_action_is_answered_with_the_error() -> None:
    """The environment does not see the message, and the model may try again."""
    environment = LetterEnvironment()
    env = env_of(environment)
    env.reset(CHAT, seed=None)
    step = env.step({'role': 'assistant', 'content': '1'}, is_last=False)
    assert (step.reward, step.is_done, step.facts) == (0.0, False, {'invalid_actions': 1.0})
    assert step.messages[0]['content'] == 'Error: digits are not allowed'
    assert environment.action_count == 0
    assert environment.seeds == [None]


def test_unusable_episodes_are_refused() -> None:
    """Arguments of `reset` must be an object, and the episode must not end at its start."""
    with pytest.raises(ValueError):  # noqa: PT011 (a malformed field)
        env_of(LetterEnvironment()).reset({'messages': [], 'user_data': [pack_value('openenv_reset', [1])]}, seed=None)
    ended = SimpleNamespace(reset=lambda: SimpleNamespace(text='', reward=None, done=True))
    with pytest.raises(ValueError):  # noqa: PT011 (the only error of an ended episode)
        env_of(ended).reset({'messages': []}, seed=None)


def test_clients_are_used_in_their_synchronous_form() -> None:
    """A client is connected before it is used, and its results contain the observation."""
    environment = LetterEnvironment()
    calls: list[str] = []

    class Client:
        """A client with the interface of OpenEnv's `EnvClient`."""

        def sync(self) -> Any:
            calls.append('sync')
            return self

        def connect(self) -> Any:
            calls.append('connect')
            return self

        def reset(self, **options: Any) -> Any:
            return SimpleNamespace(observation=environment.reset(**options), reward=None, done=False)

    env = openenv_envs(Client, observe=lambda observation: observation.text, act=act)()
    assert calls == ['sync', 'connect']
    assert env.reset(CHAT, seed=1)['messages'][-1]['content'] == 'Go.'


@pytest.mark.skipif(importlib.util.find_spec('openenv') is not None, reason='OpenEnv is installed')
def test_missing_openenv_names_its_extra() -> None:
    """An address needs OpenEnv, and the error names the extra."""
    with pytest.raises(MissingLibrary) as caught:
        openenv_envs('http://127.0.0.1:1', observe=str, act=str)
    assert caught.value.install == 'twinkle-grpc[openenv]'


@pytest.mark.skipif(importlib.util.find_spec('verifiers') is not None, reason='verifiers is installed')
def test_missing_verifiers_names_its_extra() -> None:
    """Environments of verifiers need the library, and the error names the extra."""
    for call in (lambda: load_verifiers('gsm8k'), lambda: VerifiersEnvs(None)):
        with pytest.raises(MissingLibrary) as caught:
            call()
        assert caught.value.install == 'twinkle-grpc[verifiers]'
