"""Environments of the optional library verifiers: tasks, tool servers, harnesses and rewards."""

import importlib
from collections.abc import Iterator, Mapping
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

from twinkle.component import MissingLibrary
from twinkle.data_format import Message, Trajectory, pack_value, user_data_get
from twinkle.rollout.chat_endpoint import ChatEndpoint
from twinkle.rollout.env import Env
from twinkle.rollout.errors import ProgramFailed
from twinkle.rollout.program_chat import Outcome, ProgramChat
from twinkle.rollout.program_env import CallParser, ProgramEnv, ProgramHost

_INDEX = 'verifiers_index'
_KEY_VARIABLE = 'TWINKLE_ROLLOUT_KEY'
"""Variable that verifiers reads the endpoint's key from. It is not set, because the endpoint needs no key."""
_STOP_CONDITION = 'rollout_limit'


def load_verifiers(taskset: str | Mapping[str, Any], *, env: str = '', **config: Any) -> Any:
    """Create an environment of verifiers from the ids of installed packages.

    Args:
        taskset: id of the taskset, or its configuration with the key `id`.
        env: id of an environment that is combined with the taskset. Empty: the taskset's environment, or one agent.
        config: other fields of the environment's configuration, such as
            `agent={'harness': {'id': 'null'}, 'runtime': {'type': 'subprocess'}}`.

    Raises:
        MissingLibrary: verifiers is not installed.
        ModuleNotFoundError: a package is not installed.
        ValueError: the configuration is invalid.
    """
    library = _library()
    given = {'id': taskset} if isinstance(taskset, str) else dict(taskset)
    return library.load_environment(library.resolve_env_config({'id': env, 'taskset': given, **config}))


class VerifiersEnvs:
    """Runs the episodes of an environment of verifiers. Use it in a `with` block, as the option `env`.

    Episodes run in a thread, as verifiers runs them: with harness, tool servers and rewards. The agent asks for turns
    at a local endpoint, and the rollout samples them. Agents whose configuration has a `client` use that client
    instead. The reward of the trained agent is the reward of the last turn. The agent's scores and metrics are facts.

    Args:
        environment: environment of verifiers 0.4, such as the result of `load_verifiers`.
        template: finds tool calls in turns, such as the sampler's `template`. Needed for environments with tools.
        timeout: maximum time until an episode asks for its next turn or ends.

    Raises:
        MissingLibrary: verifiers is not installed.
        TypeError: `environment` is not an environment of verifiers 0.4.
    """

    def __init__(
        self, environment: Any, *, template: CallParser | None = None, timeout: timedelta = timedelta(minutes=10)
    ) -> None:
        self._library = _library()
        if not isinstance(environment, self._library.Env):
            raise TypeError(
                f'environment must be a verifiers.v1.Env, got {type(environment).__name__}; use load_verifiers'
            )
        self._environment, self._template, self._timeout = environment, template, timeout
        self._tasks: dict[int, Any] = {}
        self._host: ProgramHost | None = None

    def __enter__(self) -> Self:
        """Start the servers that the episodes share."""
        self._host = ProgramHost(self._environment.serving)
        self._host.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the servers."""
        del kind, error, trace
        host, self._host = self._host, None
        if host is not None:
            host.close()

    def chats(self) -> Iterator[Trajectory]:
        """Yield one chat per task, in the order of the taskset, which may be infinite.

        An environment starts from the task whose index is in `user_data`. The messages are the task's prompt; a rollout
        replaces them with the messages of the program's first request.
        """
        for task in self._environment.taskset:
            self._tasks[task.data.idx] = task
            opening: list[Message] = (
                [{'role': 'system', 'content': system}] if (system := task.data.system_prompt) else []
            )
            question: Message = {'role': 'user', 'content': task.data.prompt_text}
            yield {'messages': [*opening, question], 'user_data': [pack_value(_INDEX, task.data.idx)]}

    def __call__(self) -> Env:
        """Return the environment of one sample.

        Raises:
            RuntimeError: the `with` block was not entered, or was left.
        """
        if self._host is None:
            raise RuntimeError('the environments are not running; use them in a with block')
        return ProgramEnv(self._host, self._episode_of, parser=self._template, timeout=self._timeout)

    def _episode_of(self, trajectory: Trajectory) -> '_Episode':
        index = user_data_get(trajectory, _INDEX)
        if not isinstance(index, int) or index not in self._tasks:
            raise ValueError(f'user_data.{_INDEX} must be an index that chats() has yielded, got {index!r}')
        return _Episode(self._library, self._environment, self._tasks[index])


class _Episode:
    """A `Program` that is one episode."""

    def __init__(self, library: Any, environment: Any, task: Any) -> None:
        self._library, self._environment, self._task = library, environment, task
        self._traces: list[Any] = []

    async def run(self, endpoint: ChatEndpoint, chat: ProgramChat) -> Outcome:
        """Run the episode and return the reward and metrics of the trained agent.

        Raises:
            ProgramFailed: the episode failed, or does not have exactly one trained agent.
        """

        def watch(trace: Any) -> None:
            self._traces.append(trace)
            # The library sends the trace's id in a header. One address for all chats lets it share its connections.
            endpoint.add_name(chat, trace.id)

        client = self._library.EvalClientConfig(base_url=endpoint.base_url, api_key_var=_KEY_VARIABLE)
        context = self._library.ModelContext(model='rollout', client=client)
        episode = await self._environment.run_episode(self._task, context, on_trace=watch)
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise ProgramFailed('; '.join(f'{error.type}: {error.message}' for error in errors) or 'the episode failed')
        trained = [trace for trace in episode.traces if trace.agent.trainable]
        if len(trained) != 1:
            raise ProgramFailed(
                f'the episode has {len(trained)} trained agents; only environments with one are supported'
            )
        scores = {name: reward.score for name, reward in trained[0].rewards.items() if reward is not None}
        metrics = {name: value for name, value in trained[0].metrics.items() if value is not None}
        return Outcome(reward=float(trained[0].reward), facts={**scores, **metrics})

    def stop(self) -> None:
        """End the agents' turns as verifiers does at a limit, so that the episode is scored."""
        for trace in self._traces:
            trace.stop(_STOP_CONDITION)


def _library() -> Any:
    try:
        return importlib.import_module('verifiers.v1')
    except ImportError as error:
        raise MissingLibrary('verifiers', 'twinkle-grpc[verifiers]') from error
