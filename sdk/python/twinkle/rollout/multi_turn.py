"""Batched multi-turn chats between a sampler and environments."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any, Protocol, TypedDict, Unpack, cast

import numpy as np

from twinkle.blocking import results_of
from twinkle.data_format import SampledSequence, SampleResponse, SamplingParams, Trajectory
from twinkle.rollout.bridge import ChatFormat
from twinkle.rollout.env import EnvFactory, SingleTurn
from twinkle.rollout.episode import EndReason, Episode, Rollout
from twinkle.rollout.tool_env import ParseCalls, ToolEnv
from twinkle.rollout.tool_manager import ToolManager
from twinkle.rollout.tracing import RolloutTracing


class TokenSampler(Protocol):
    """The part of a sampler that rollouts use; `twinkle.sampler.Sampler` implements it."""

    @property
    def template(self) -> Any:
        """Chat template of the model."""
        ...

    def sample(
        self, inputs: Any, sampling_params: Any = None, adapter_name: str = '', *, num_samples: int | None = None
    ) -> list[SampleResponse]:
        """Return the completions of each input, in order."""
        ...


class RolloutOptions(TypedDict, total=False):
    """Options of `MultiTurnRollout`."""

    env: EnvFactory
    """Class or function that creates the environment of one sample. Default: a `ToolEnv`, or `SingleTurn` without
    tools."""
    parse_tool_call: ParseCalls
    """Finds the tool calls in a message of the model. Default: the template's parser."""
    max_turns: int
    """Maximum number of turns of the model. Default: 6."""
    max_trajectory_tokens: int
    """Maximum number of tokens of a chat. Default: the model's context length."""
    num_samples: int
    """Number of samples per trajectory. Default: 1."""
    adapter_name: str
    """Adapter to sample with, see `Sampler.sample`. Default: the adapter received from a trainer."""
    env_threads: int
    """Number of environments that may step at the same time; does not affect the results. Default: 1."""
    trace_dir: str | PathLike[str]
    """Folder for `rollouts.jsonl`, with one line per rollout. Default: no file is written."""
    trace_callback: Callable[[Rollout], object]
    """Called with each rollout at the end of a call, in order."""
    success_callback: Callable[[Rollout], object]
    """Returns whether a rollout succeeded. The result becomes the fact `success`, 1 or 0."""


class MultiTurnRollout:
    """Samples multi-turn chats. Sampled tokens are never tokenized again.

    All chats of a call advance together, one turn at a time. Set `sampling_params.max_tokens`, because chats with
    different numbers of remaining tokens can otherwise not be sampled in one batch.

    With a seed, all results are a function of the seed, the inputs and the weights. Chats with the same text prompt are
    then samples of one request in the first turn, whether they come from one trajectory or several. In a later turn
    `t`, the `j`-th chat with the same first prompt uses a seed that is derived from the call's seed, `t` and `j`.

    Args:
        sampler: samples the turns.
        template: chat template of the model. None: the sampler's template.
        tool_manager: tools that the model may call. Cannot be combined with `env`.
        sampling_params: parameters of each turn. `num_samples` and `seed` in them are the defaults of the option
            `num_samples` and of the call's `seed`.
        options: see `RolloutOptions`.

    Raises:
        ValueError: an option is out of range, or two options conflict. The message names the options.
        TypeError: an option is unknown.

    Concurrency: the same as the sampler's.
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
            raise ValueError('env and tool_manager are both set; pass only one, or call the tools in the environment')
        self._sampler = sampler
        self._template: ChatFormat = sampler.template if template is None else template
        given = sampling_params
        self._params = given if isinstance(given, SamplingParams) else SamplingParams.from_dict(given or {})
        self._max_turns = _at_least_one('max_turns', options.get('max_turns', 6))
        self._limit = options.get('max_trajectory_tokens')
        if self._limit is not None:
            _at_least_one('max_trajectory_tokens', self._limit)
        if self._params.max_tokens == 0:
            raise ValueError('sampling_params.max_tokens must be at least 1, got 0')
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
        """Return the samples of all trajectories in order; the samples of one trajectory are adjacent.

        Errors of an environment or the sampler propagate after all environments are closed.

        Args:
            trajectories: initial chats, one or many.
            num_samples: number of samples per trajectory. None: the option `num_samples`.
            seed: seed of the call. None: `sampling_params.seed`.

        Raises:
            ValueError: `trajectories` is empty, `num_samples` is below 1, or a chat or a reply is malformed.
            ChatCannotGoOn: the chat template omits earlier assistant turns.
            TemplateError: the chat template refuses a reply.
            CallbackFailed: a callback raised an error.
            OSError: the trace file cannot be written.
        """
        chats: list[Any] = [trajectories] if isinstance(trajectories, Mapping) else list(trajectories)
        if not chats:
            raise ValueError('trajectories is empty; pass at least one chat')
        count = self._num_samples if num_samples is None else _at_least_one('num_samples', num_samples)
        seed = self._params.seed if seed is None else seed
        with self._episodes(len(chats), count) as episodes, self._pool() as run_all:
            run_all(
                lambda episode: episode.begin(
                    chats[episode.trajectory_index], seed=_derived_seed(seed, episode.trajectory_index)
                ),
                episodes,
            )
            _number_duplicates(episodes)
            limit = _Limit(self._limit)
            for turn in range(self._max_turns):
                running = [episode for episode in episodes if episode.end_reason is None]
                turns = list(self._turn(running, limit, seed=seed, turn=turn))
                turns_left = self._max_turns - turn - 1
                run_all(
                    lambda pair, left=turns_left: pair[0].add_turn(
                        pair[1],
                        turns_left=left,
                        tokens_left=limit.tokens_left(len(pair[0].track) + len(pair[1].tokens)),
                    ),
                    turns,
                )
            rollouts = [episode.result() for episode in episodes]
        return self._trace(rollouts)

    def _turn(
        self, episodes: Sequence[Episode], limit: '_Limit', *, seed: int | None, turn: int
    ) -> Iterator[tuple[Episode, SampledSequence]]:
        """Yield each chat with its next turn; end chats that cannot take another turn."""
        waiting: list[list[Episode]] = _requests(episodes, is_first=turn == 0, is_seeded=seed is not None)
        while waiting:
            full = [episode for request in waiting for episode in request if limit.tokens_left(len(episode.track)) == 0]
            for episode in full:
                episode.end_reason = EndReason.MAX_TOKENS
            waiting = [request for request in waiting if request[0].end_reason is None]
            if not waiting:
                return
            # All requests of one sampler call must have the same seed, length and number of samples.
            keys = [self._key(request, limit, seed) for request in waiting]
            group = [request for request, key in zip(waiting, keys, strict=True) if key == keys[0]]
            try:
                yield from self._sample_group(group, keys[0], seed=None if seed is None else (seed, turn))
            except ValueError as error:
                if not limit.lower_from(error):
                    raise
                continue
            waiting = [request for request, key in zip(waiting, keys, strict=True) if key != keys[0]]

    def _sample_group(
        self, group: Sequence[list[Episode]], key: '_Key', *, seed: tuple[int, int] | None
    ) -> list[tuple[Episode, SampledSequence]]:
        params = replace(
            self._params,
            seed=None if seed is None else _derived_seed(*seed, key.seed_index),
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
        tokens_left, wanted = limit.tokens_left(len(request[0].track)), self._params.max_tokens
        return _Key(
            seed_index=0 if seed is None else request[0].duplicate_index,
            max_tokens=wanted if tokens_left is None else tokens_left if wanted is None else min(tokens_left, wanted),
            count=len(request),
        )

    @contextmanager
    def _episodes(self, count: int, num_samples: int) -> Iterator[list[Episode]]:
        """Create the chats, and close their environments on exit."""
        with ExitStack() as stack:
            episodes: list[Episode] = []
            for index in range(count * num_samples):
                env = self._make_env()
                stack.callback(env.close)
                trajectory_index, sample_index = divmod(index, num_samples)
                episodes.append(
                    Episode(env, self._template, trajectory_index=trajectory_index, sample_index=sample_index)
                )
            yield episodes

    @contextmanager
    def _pool(self) -> Iterator['_RunAll']:
        """Yield a function that applies a function to all items and raises the first error in item order."""
        if self._env_threads == 1:
            yield _run_sequentially
            return
        with ThreadPoolExecutor(self._env_threads, thread_name_prefix='rollout-env') as pool:

            def run_in_threads(function: Callable[[Any], None], items: Sequence[Any]) -> None:
                results_of([pool.submit(function, item) for item in items])

            yield run_in_threads

    def _env_of(self, tools: ToolManager | None, parse: ParseCalls | None) -> EnvFactory:
        if tools is None:
            return SingleTurn
        template, specs = cast('Any', self._template), tools.specs
        find: ParseCalls = parse or (lambda text: template.parse_tool_call(text, specs))
        return lambda: ToolEnv(tools, find)


@dataclass(frozen=True, kw_only=True)
class _Key:
    """Properties that all requests of one sampler call share."""

    seed_index: int
    """Index of the chat among the chats with the same first prompt. Its seed is derived from this index."""
    max_tokens: int | None
    count: int
    """Number of samples per request."""


def _number_duplicates(episodes: Sequence[Episode]) -> None:
    """Assign indexes to chats that start with the same tokens; with equal seeds, they would get the same samples."""
    counts: Counter[tuple[int, ...]] = Counter()
    for episode in episodes:
        episode.duplicate_index = counts[episode.track.token_ids]
        counts[episode.track.token_ids] += 1


def _requests(episodes: Sequence[Episode], *, is_first: bool, is_seeded: bool) -> list[list[Episode]]:
    """Group chats into requests. In the first turn, chats with the same prompt share a request."""
    lists: dict[tuple[object, ...], list[Episode]] = {}
    for episode in episodes:
        # Trajectories are merged only with a seed: without one, requests of equal size form larger batches. Prompts
        # with images are not merged, because equal tokens may represent different images.
        is_merged = is_seeded and episode.is_text_only
        first = (episode.track.token_ids, None if is_merged else episode.trajectory_index)
        lists.setdefault(first if is_first else (episode.trajectory_index, episode.sample_index), []).append(episode)
    return list(lists.values())


class _Limit:
    """Maximum number of tokens of a chat: the caller's limit, or the model's context once it is known."""

    def __init__(self, max_tokens: int | None) -> None:
        self._max_tokens = max_tokens

    def tokens_left(self, token_count: int) -> int | None:
        """Return the number of tokens that may follow `token_count` tokens, at least 0. None: no known limit."""
        return None if self._max_tokens is None else max(self._max_tokens - token_count, 0)

    def lower_from(self, error: ValueError) -> bool:
        """Lower the limit to the context length that a sampler's error reports; return whether the limit changed."""
        # All samplers use this attribute name. Importing their error class would import torch.
        context: int | None = getattr(error, 'context_tokens', None)
        if context is None or (self._max_tokens is not None and self._max_tokens <= context):
            return False
        self._max_tokens = context
        return True


_RunAll = Callable[[Callable[[Any], None], Sequence[Any]], None]


def _run_sequentially(function: Callable[[Any], None], items: Sequence[Any]) -> None:
    for item in items:
        function(item)


def _derived_seed(seed: int | None, *indices: int) -> int | None:
    """Return a seed that depends on `seed` and all indices; without a seed, return None."""
    if seed is None:
        return None
    return int(np.random.SeedSequence([abs(seed), int(seed < 0), *indices]).generate_state(1)[0])


def _at_least_one(name: str, value: int) -> int:
    if isinstance(value, bool) or value < 1:
        raise ValueError(f'{name} must be an integer of at least 1, got {value!r}')
    return value
