"""Environments of the optional library OpenEnv: in this process, or behind a server."""

import importlib
from collections.abc import Callable
from typing import Any, cast

from twinkle.component import MissingLibrary
from twinkle.data_format import Message, Trajectory, user_data_get
from twinkle.rollout.env import EnvFactory, EnvStep

RESET_KEY = 'openenv_reset'
"""Key of `user_data` with the arguments of `reset` for a trajectory, such as the index of a task."""
Observe = Callable[[Any], str]
"""Returns the text of an observation, which the model reads as a message of the user."""
Act = Callable[[str], Any]
"""Returns the action in a message of the model; raises a ValueError if the message contains no valid action."""


class OpenEnvEnv:
    """The environment of one chat in which the model acts on observations.

    The first observation follows the messages of the trajectory. A message without a valid action is answered with the
    error, and counted as the fact `invalid_actions`; the environment does not see it.

    Args:
        environment: object with OpenEnv's `reset`, `step` and `close`: an `Environment`, or a synchronous client.
        observe: see `openenv_envs`.
        act: see `openenv_envs`.
    """

    def __init__(self, environment: Any, *, observe: Observe, act: Act) -> None:
        self._environment, self._observe, self._act = environment, observe, act

    def reset(self, trajectory: Trajectory, *, seed: int | None) -> Trajectory:
        """Reset the environment with the seed and the trajectory's `openenv_reset`, and add its observation.

        Raises:
            ValueError: `user_data.openenv_reset` is not an object, or the episode ends at its start.
        """
        options = user_data_get(trajectory, RESET_KEY, {})
        if not isinstance(options, dict):
            raise ValueError(f'user_data.{RESET_KEY} must be an object with arguments of reset, got {options!r}')
        seeded = {} if seed is None else {'seed': seed}
        result = self._environment.reset(**{**seeded, **cast('dict[str, Any]', options)})
        if result.done:
            raise ValueError('the environment ended the episode at its start; check the arguments of reset')
        messages = [*trajectory.get('messages', []), self._message(result)]
        return cast('Trajectory', {**trajectory, 'messages': messages})

    def step(self, message: Message, *, is_last: bool) -> EnvStep:
        """Pass the action in the message to the environment."""
        del is_last
        try:
            action = self._act(str(message.get('content', '')))
        except ValueError as error:
            reply: Message = {'role': 'user', 'content': f'Error: {error}'}
            return EnvStep(messages=[reply], facts={'invalid_actions': 1.0})
        result = self._environment.step(action)
        # Some environments have no reward before the end of the episode.
        return EnvStep(messages=[self._message(result)], reward=float(result.reward or 0.0), is_done=bool(result.done))

    def close(self) -> None:
        """Close the environment, which ends the session at a server."""
        self._environment.close()

    def _message(self, result: Any) -> Message:
        # Clients return a result that contains the observation; an environment returns the observation.
        return {'role': 'user', 'content': self._observe(getattr(result, 'observation', result))}


def openenv_envs(source: str | Callable[[], Any], *, observe: Observe, act: Act) -> EnvFactory:
    """Return a factory of OpenEnv environments, for `MultiTurnRollout(env=...)`.

    A server runs one session per sample of a call, up to its limit of concurrent environments.

    Args:
        source: address of a server, whose observations and actions are then dicts; or a function that returns a client
            or an environment in this process. An `Environment` class is such a function.
        observe: returns the text of an observation.
        act: returns the action in a message of the model; raises a ValueError if the message has no valid action.

    Raises:
        MissingLibrary: `source` is an address, and OpenEnv is not installed.
    """
    if isinstance(source, str):
        client_type = _library().GenericEnvClient
        address = source
        return lambda: OpenEnvEnv(_connected(client_type(base_url=address)), observe=observe, act=act)
    make = source
    return lambda: OpenEnvEnv(_connected(make()), observe=observe, act=act)


def _connected(environment: Any) -> Any:
    """Return an environment, or the connected synchronous form of a client."""
    client = environment.sync() if hasattr(environment, 'sync') else environment
    return client.connect() if hasattr(client, 'connect') else client


def _library() -> Any:
    try:
        return importlib.import_module('openenv.core')
    except ImportError as error:
        raise MissingLibrary('OpenEnv', 'twinkle-grpc[openenv]') from error
