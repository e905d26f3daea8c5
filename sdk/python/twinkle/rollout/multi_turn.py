"""Chats of several turns between a sampler and environments, many at once."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any, Protocol, TypedDict, Unpack, cast

import numpy as np

from twinkle.data_format import SampledSequence, SampleResponse, SamplingParams, Trajectory
from twinkle.rollout.bridge import ChatFormat
from twinkle.rollout.env import EnvFactory, SingleTurn
from twinkle.rollout.episode import EndReason, Episode, Rollout
from twinkle.rollout.tool_env import ParseCalls, ToolEnv
from twinkle.rollout.tool_manager import ToolManager
from twinkle.rollout.tracing import RolloutTracing


class TokenSampler(Protocol):
    """What the room needs of a sampler; `twinkle.sampler.Sampler` has it."""

    @property
    def template(self) -> Any:
        """How chats become tokens."""
        ...

    def sample(
        self, inputs: Any, sampling_params: Any = None, adapter_name: str = '', *, num_samples: int | None = None
    ) -> list[SampleResponse]:
        """Return the completions of each input, in order."""
        ...


class RolloutOptions(TypedDict, total=False):
    """How chats go."""

    env: EnvFactory
    """Makes the world of one sample, such as a class. Unset: the tools', or a single turn where there are none."""
    parse_tool_call: ParseCalls
    """Finds the calls in what a model said. Unset: the template's."""
    max_turns: int
    """Most turns of the model. Unset: 6."""
    max_trajectory_tokens: int
    """Most tokens of a whole chat. Unset: as many as the model's context."""
    num_samples: int
    """Samples of each trajectory. Unset: 1."""
    adapter_name: str
    """As of `Sampler.sample`. Unset: the one received from a trainer."""
    env_threads: int
    """Worlds that may answer at once. Results do not depend on it. Unset: 1."""
    trace_dir: str | PathLike[str]
    """Folder whose `rollouts.jsonl` gets a line for each rollout. Unset: nothing is written."""
    trace_callback: Callable[[Rollout], object]
    """Called with each rollout of a call, in order, at its end."""
    success_callback: Callable[[Rollout], object]
    """Says of a rollout whether it succeeded; becomes its fact `success`, 1 or 0."""


class MultiTurnRollout:
    """Samples chats turn by turn; what a model drew stays the tokens it drew.

    The chats of a call take their turns together. Give `sampling_params.max_tokens`: turns whose chats have room
    for as much run as one batch.

    With a seed, everything drawn is a function of it, of the inputs and the weights. In the first turn chats with one
    prompt are samples of one request, be they siblings or given several times; the `j`-th of them draws its later turn
    `t` from a seed of its own, made of all three.

    Args:
        sampler: draws the turns.
        template: the model's. Unset: the sampler's.
        tool_manager: tools the model may call; not together with `env`.
        sampling_params: of each turn; their `num_samples` and `seed` are taken where none are given here or at a call.
        options: see `RolloutOptions`.

    Raises:
        ValueError: an option is out of its range, or two say different things; names it.
        TypeError: an option is unknown.

    Concurrency: as the sampler's.
    """

    def __init__(
        self,
        sampler: TokenSampler,
        template: ChatFormat | None = None,
        tool_manager: ToolManager | None = None,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        **options: Unpack[RolloutOptions],
    ) -> None:
        unknown = sorted(set(options) - set(RolloutOptions.__annotations__))
        if unknown:
            raise TypeError(f'unknown rollout options {unknown}; known are {sorted(RolloutOptions.__annotations__)}')
        if tool_manager is not None and 'env' in options:
            raise ValueError('env and tool_manager are both given; let the environment call the tools, or leave it out')
        self._sampler = sampler
        self._template: ChatFormat = sampler.template if template is None else template
        given = sampling_params
        self._params = given if isinstance(given, SamplingParams) else SamplingParams.from_dict(given or {})
        self._max_turns = _at_least_one('max_turns', options.get('max_turns', 6))
        self._limit = options.get('max_trajectory_tokens')
        if self._limit is not None:
            _at_least_one('max_trajectory_tokens', self._limit)
        if self._params.max_tokens == 0:
            raise ValueError('sampling_params.max_tokens is 0, which draws nothing; give at least 1')
        self._num_samples = _at_least_one('num_samples', options.get('num_samples', self._params.num_samples))
        self._adapter_name = options.get('adapter_name', '')
        self._env_threads = _at_least_one('env_threads', options.get('env_threads', 1))
        self._trace = RolloutTracing(
            options.get('trace_dir'), options.get('trace_callback'), options.get('success_callback')
        )
        self._make_env = options.get('env') or self._env_of(tool_manager, options.get('parse_tool_call'))

    def __call__(
        self,
        trajectories: Trajectory | Sequence[Trajectory],
        *,
        num_samples: int | None = None,
        seed: int | None = None,
    ) -> list[Rollout]:
        """Return the samples of each trajectory, those of one trajectory side by side, in order.

        Args:
            trajectories: chats to go on from, one or many.
            num_samples: of each, in place of the option's.
            seed: in place of `sampling_params.seed`.

        Raises:
            ValueError: there are no trajectories, or a chat, an answer or a number is malformed.
            ChatCannotGoOn, TemplateError: the chat template cannot show an answer.
            CallbackFailed: a callback raised.
            Whatever an environment or the sampler raises; all environments are closed first.
        """
        chats: list[Any] = [trajectories] if isinstance(trajectories, Mapping) else list(trajectories)
        if not chats:
            raise ValueError('trajectories is empty; give at least one chat')
        count = self._num_samples if num_samples is None else _at_least_one('num_samples', num_samples)
        seed = self._params.seed if seed is None else seed
        with self._episodes(len(chats), count) as episodes, self._pool() as run_all:
            run_all(
                lambda one: one.begin(chats[one.trajectory_index], seed=_mixed(seed, one.trajectory_index)), episodes
            )
            _number_twins(episodes)
            limit = _Limit(self._limit)
            for turn in range(self._max_turns):
                waiting = [one for one in episodes if one.end_reason is None]
                drawn = list(self._turn(waiting, limit, seed=seed, turn=turn))
                turns_left = self._max_turns - turn - 1
                run_all(
                    lambda pair, left=turns_left: pair[0].take(
                        pair[1], turns_left=left, room=limit.room(len(pair[0].track) + len(pair[1].tokens))
                    ),
                    drawn,
                )
            rollouts = [one.result() for one in episodes]
        return self._trace(rollouts)

    def _turn(
        self, episodes: Sequence[Episode], limit: '_Limit', *, seed: int | None, turn: int
    ) -> Iterator[tuple[Episode, SampledSequence]]:
        """Yield each chat that has room with its next turn; end the others."""
        waiting: list[list[Episode]] = _requests(episodes, is_first=turn == 0, is_seeded=seed is not None)
        while waiting:
            full = [one for request in waiting for one in request if limit.room(len(one.track)) == 0]
            for one in full:
                one.end_reason = EndReason.MAX_TOKENS
            waiting = [request for request in waiting if request[0].end_reason is None]
            if not waiting:
                return
            # One call has one seed, length and number of samples: the first request's, and all that share them.
            keys = [self._key(request, limit, seed) for request in waiting]
            group = [request for request, key in zip(waiting, keys, strict=True) if key == keys[0]]
            try:
                yield from self._draw(group, keys[0], seed=None if seed is None else (seed, turn))
            except ValueError as error:
                if not limit.learn(error):
                    raise
                continue
            waiting = [request for request, key in zip(waiting, keys, strict=True) if key != keys[0]]

    def _draw(
        self, group: Sequence[list[Episode]], key: '_Key', *, seed: tuple[int, int] | None
    ) -> list[tuple[Episode, SampledSequence]]:
        """Return the next turn of each chat of the group."""
        params = replace(
            self._params,
            seed=None if seed is None else _mixed(*seed, key.slot),
            max_tokens=key.max_tokens,
            num_samples=key.count,
        )
        inputs = [request[0].model_input() for request in group]
        responses = self._sampler.sample(inputs, params, self._adapter_name, num_samples=key.count)
        return [
            pair
            for request, response in zip(group, responses, strict=True)
            for pair in zip(request, response.sequences, strict=True)
        ]

    def _key(self, request: Sequence[Episode], limit: '_Limit', seed: int | None) -> '_Key':
        room, wanted = limit.room(len(request[0].track)), self._params.max_tokens
        return _Key(
            slot=0 if seed is None else request[0].twin_index,
            max_tokens=wanted if room is None else room if wanted is None else min(room, wanted),
            count=len(request),
        )

    @contextmanager
    def _episodes(self, count: int, num_samples: int) -> Iterator[list[Episode]]:
        """Make the chats and, in the end, close their worlds."""
        with ExitStack() as stack:
            episodes: list[Episode] = []
            for index in range(count * num_samples):
                env = self._make_env()
                stack.callback(env.close)
                place = divmod(index, num_samples)
                episodes.append(Episode(env, self._template, trajectory_index=place[0], sample_index=place[1]))
            yield episodes

    @contextmanager
    def _pool(self) -> Iterator['_RunAll']:
        """Give a way to do something with each item; the first error, in order, is raised."""
        if self._env_threads == 1:
            yield _one_by_one
            return
        with ThreadPoolExecutor(self._env_threads, thread_name_prefix='rollout-env') as pool:

            def at_once(function: Callable[[Any], None], items: Sequence[Any]) -> None:
                for _ in pool.map(function, items):
                    continue

            yield at_once

    def _env_of(self, tools: ToolManager | None, parse: ParseCalls | None) -> EnvFactory:
        if tools is None:
            return SingleTurn
        template, specs = cast('Any', self._template), tools.specs
        find: ParseCalls = parse or (lambda text: template.parse_tool_call(text, specs))
        return lambda: ToolEnv(tools, find)


@dataclass(frozen=True, kw_only=True)
class _Key:
    """What the requests of one call have in common."""

    slot: int
    """Place among chats with one prompt, which has a seed of its own."""
    max_tokens: int | None
    count: int
    """Chats that a request draws for."""


def _number_twins(episodes: Sequence[Episode]) -> None:
    """Number chats that begin with the same tokens: under one seed they would draw the same."""
    counts: Counter[tuple[int, ...]] = Counter()
    for one in episodes:
        one.twin_index = counts[one.track.token_ids]
        counts[one.track.token_ids] += 1


def _requests(episodes: Sequence[Episode], *, is_first: bool, is_seeded: bool) -> list[list[Episode]]:
    """Return chats in lists that one request can draw for: before the first turn, those with one prompt."""
    lists: dict[tuple[object, ...], list[Episode]] = {}
    for one in episodes:
        # Without a seed requests draw apart, and those of one size make larger batches; images may differ.
        is_any_twin = is_seeded and one.is_text_alone
        first = (one.track.token_ids, None if is_any_twin else one.trajectory_index)
        lists.setdefault(first if is_first else (one.trajectory_index, one.sample_index), []).append(one)
    return list(lists.values())


class _Limit:
    """Most tokens of a chat: the caller's bound, or the model's context once the sampler told it."""

    def __init__(self, max_tokens: int | None) -> None:
        self._max_tokens = max_tokens

    def room(self, token_count: int) -> int | None:
        """Return tokens left beside so many, at least 0; None where nothing is known."""
        return None if self._max_tokens is None else max(self._max_tokens - token_count, 0)

    def learn(self, error: ValueError) -> bool:
        """Take the context from a sampler's refusal; return whether that is news."""
        # Samplers here and elsewhere name it so; importing theirs would load torch.
        context: int | None = getattr(error, 'context_tokens', None)
        if context is None or (self._max_tokens is not None and self._max_tokens <= context):
            return False
        self._max_tokens = context
        return True


_RunAll = Callable[[Callable[[Any], None], Sequence[Any]], None]


def _one_by_one(function: Callable[[Any], None], items: Sequence[Any]) -> None:
    for item in items:
        function(item)


def _mixed(seed: int | None, *places: int) -> int | None:
    """Return a seed of its own for a place; None stays None."""
    if seed is None:
        return None
    return int(np.random.SeedSequence([abs(seed), int(seed < 0), *places]).generate_state(1)[0])


def _at_least_one(name: str, value: int) -> int:
    if isinstance(value, bool) or value < 1:
        raise ValueError(f'{name} must be at least 1, got {value!r}')
    return value
