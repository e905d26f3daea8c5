"""Rollouts of a run: completions with rewards. The server removes the oldest rollouts if a run has too many."""

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt

from twinkle.api.data.v1 import message_pb2
from twinkle.api.gateway.v1 import rollout_service_pb2 as pb
from twinkle.api.gateway.v1.rollout_service_pb2_grpc import RolloutServiceStub
from twinkle.api.tensor.v1 import tensor_pb2
from twinkle.data_format import Message, Trajectory, VersionSpan
from twinkle.tracking import tracked_rollouts
from twinkle_client.client import TwinkleClient, current_client
from twinkle_client.convert import tensor_from_proto, trajectory_from_proto
from twinkle_client.convert.rollouts import rollout_to_proto
from twinkle_client.metrics import step_to_proto
from twinkle_client.rpc import LoopThread, remote_method

EVALUATION = 'evaluation'
"""Id of the group with answers to fixed questions. The console compares the answers of a run's first and last step."""
_REQUEST_BYTES, _ROLLOUTS_PER_REQUEST = 8 << 20, 1024
_PAGE_SIZE = 200


@dataclass(frozen=True, kw_only=True)
class RewardStatistics:
    """Statistics of the finite rewards of a group; all fields are 0 without such rewards."""

    count: int
    mean: float
    standard_deviation: float
    minimum: float
    maximum: float


@dataclass(frozen=True, kw_only=True)
class RolloutSummary:
    """Summary of a rollout. An unknown value is empty or None."""

    rollout_id: str
    index: int
    reward: float | None
    reward_parts: Mapping[str, float]
    advantage: float | None
    finish_reason: str
    prompt_token_count: int | None
    completion_token_count: int | None
    oldest_version: int | None
    """Oldest adapter version that sampled a token; 0 is the base model."""
    newest_version: int | None
    """Newest adapter version that sampled a token."""
    prompt_preview: str
    """Beginning of the prompt's last message; for a prompt given as text, the end of the text."""
    completion_preview: str
    """Beginning of the completion."""


@dataclass(frozen=True, kw_only=True)
class RolloutGroup:
    """Summary of rollouts that are compared with each other, such as the completions of one prompt."""

    step: int
    group_id: str
    rollouts: Sequence[RolloutSummary]
    reward: RewardStatistics
    reward_parts: Mapping[str, RewardStatistics]
    is_degenerate: bool
    """Whether there are several rollouts with equal rewards: GRPO learns nothing from such a group."""
    update_time: datetime
    """UTC: time at which a rollout of the group was stored last."""


@dataclass(frozen=True, kw_only=True)
class LoggedRollout:
    """A rollout. An unknown value is empty or None."""

    rollout_id: str
    step: int
    group_id: str
    index: int
    prompt_chat: Trajectory | None
    prompt_text: str
    prompt_token_ids: npt.NDArray[np.int32] | None
    """int32 [P]."""
    completion_messages: Sequence[Message]
    completion_text: str
    token_ids: npt.NDArray[np.int32] | None
    """int32 [T]. Tokens after the prompt, including tokens that were not sampled."""
    logprobs: npt.NDArray[np.float32] | None
    """float32 [T]. Natural log-probability of each token when it was sampled; NaN if unknown."""
    token_advantages: npt.NDArray[np.float32] | None
    """float32 [T]. Advantage of each token."""
    reward: float | None
    reward_parts: Mapping[str, float]
    advantage: float | None
    finish_reason: str
    version_spans: Sequence[VersionSpan]
    """Ranges of `token_ids` with the version that sampled them."""


class RunRollouts:
    """Logs and reads the rollouts of a run.

    Args:
        run_id: Id of the run, which is the adapter's id.
        client: Connection to the server. Defaults to the client initialized last.
    """

    def __init__(self, run_id: str, *, client: TwinkleClient | None = None) -> None:
        self.run_id = run_id
        self._connection = current_client(client).connection
        self._stub = RolloutServiceStub(self._connection.channel)

    @property
    def loop_thread(self) -> LoopThread:
        """Event loop that runs the methods."""
        return self._connection.loop_thread

    @remote_method
    async def log(
        self,
        trajectories: Any,
        *,
        step: int,
        rewards: Any = None,
        advantages: Any = None,
        reward_parts: Mapping[str, Any] | None = None,
        groups: int | Sequence[str] | None = None,
    ) -> None:
        """Store rollouts at a step. An earlier rollout with the same step, group and position is replaced.

        Groups of more than 8 MiB together are sent in several requests, so after an error, some groups may be stored.

        Args:
            trajectories: Results of a sampler, their sequences, rollouts of `twinkle.rollout`, features or chats. Inner
                lists are groups. Rollouts of `twinkle.tracking.tracked_rollouts` are stored as they are.
            step: Step of the program, at least 0.
            rewards: Reward of each completion, in order. Unset: the rewards of rollouts of `twinkle.rollout`.
            advantages: Advantage of each completion, or a list with the advantage of each of its tokens.
            reward_parts: Parts of the rewards by name, each with a value for each completion.
            groups: Number of consecutive completions that form a group, or the id of the group of each completion.
                Unset: the completions of one response, of one inner list or of one trajectory form a group.

        Raises:
            TypeError: A completion has an unknown type, or the step is not an integer.
            ValueError: The number of rewards, advantages or groups is wrong, or a value cannot be sent.
            UsageError: A name, an id or the step is invalid, or a rollout is too large.
            NotFoundError: The run does not exist.
            QuotaError: The groups have more bytes than the server stores for a run, or than a request may change.
        """
        found = tracked_rollouts(
            trajectories, rewards=rewards, advantages=advantages, reward_parts=reward_parts, groups=groups
        )
        listed: dict[str, list[pb.Rollout]] = {}
        for rollout in found:
            listed.setdefault(rollout.group_id, []).append(rollout_to_proto(rollout))
        for part in _requests(listed):
            request = pb.LogRolloutsRequest(run_id=self.run_id, step=step_to_proto(step), groups=part)
            await self._connection.unary(self._stub.LogRollouts, request)

    @remote_method
    async def list(
        self,
        *,
        begin_step: int = 0,
        end_step: int | None = None,
        group_id: str = '',
        limit: int = 100,
        is_ascending: bool = False,
    ) -> Sequence[RolloutGroup]:
        """Return groups of rollouts with statistics, without their tokens: newest step first, then by id.

        Args:
            begin_step: First step.
            end_step: Step before which the groups end. Unset: no limit.
            group_id: Id of the group to return for each step. Empty: all.
            limit: Maximum number of groups.
            is_ascending: Whether the oldest step is first.

        Raises:
            TypeError: A number is not an integer.
            UsageError: An argument is invalid.
            NotFoundError: The run does not exist.
        """
        request = pb.ListRolloutsRequest(
            run_id=self.run_id,
            begin_step=step_to_proto(begin_step),
            end_step=None if end_step is None else step_to_proto(end_step),
            group_id=group_id,
            is_ascending=is_ascending,
        )
        found: list[RolloutGroup] = []
        limit = operator.index(limit)
        while True:
            request.page_size = max(min(limit - len(found), _PAGE_SIZE), 1)
            page = await self._connection.unary(self._stub.ListRollouts, request)
            found += map(_group, page.groups)
            if not page.next_page_token or len(found) >= limit:
                return found[: max(limit, 0)]
            request.page_token = page.next_page_token

    @remote_method
    async def get(self, rollout_id: str) -> LoggedRollout:
        """Return a rollout.

        Args:
            rollout_id: Step, group id and position with slashes between them, as in `RolloutSummary.rollout_id`.

        Raises:
            NotFoundError: The run or the rollout does not exist, or newer rollouts have replaced the rollout.
        """
        request = pb.GetRolloutRequest(run_id=self.run_id, rollout_id=rollout_id)
        return _logged(rollout_id, await self._connection.unary(self._stub.GetRollout, request))


def _requests(groups: Mapping[str, Sequence[pb.Rollout]]) -> Iterator[Sequence[pb.RolloutGroup]]:
    """Yield the groups of each request. A request contains several groups only if they are small."""
    part, part_bytes, part_count = list[pb.RolloutGroup](), 0, 0
    for group_id, rollouts in groups.items():
        sizes = [rollout.ByteSize() for rollout in rollouts]
        is_full = part_bytes + sum(sizes) > _REQUEST_BYTES or part_count + len(sizes) > _ROLLOUTS_PER_REQUEST
        if part and is_full:
            yield part
            part, part_bytes, part_count = list[pb.RolloutGroup](), 0, 0
        part.append(pb.RolloutGroup(group_id=group_id))
        for rollout, size in zip(rollouts, sizes, strict=True):
            if part_count and part_bytes + size > _REQUEST_BYTES:
                yield part
                part, part_bytes, part_count = [pb.RolloutGroup(group_id=group_id)], 0, 0
            part[-1].rollouts.append(rollout)
            part_bytes, part_count = part_bytes + size, part_count + 1
    if part:
        yield part


def _group(message: pb.RolloutGroupSummary) -> RolloutGroup:
    return RolloutGroup(
        step=message.step,
        group_id=message.group_id,
        rollouts=[_summary(rollout) for rollout in message.rollouts],
        reward=_statistics(message.reward),
        reward_parts={name: _statistics(message.reward_parts[name]) for name in sorted(message.reward_parts)},
        is_degenerate=message.is_degenerate,
        update_time=message.update_time.ToDatetime(UTC),
    )


def _statistics(message: pb.RewardStatistics) -> RewardStatistics:
    return RewardStatistics(
        count=message.count,
        mean=message.mean,
        standard_deviation=message.standard_deviation,
        minimum=message.minimum,
        maximum=message.maximum,
    )


def _summary(message: pb.RolloutSummary) -> RolloutSummary:
    return RolloutSummary(
        rollout_id=message.rollout_id,
        index=message.index,
        reward=message.reward if message.HasField('reward') else None,
        reward_parts=dict(sorted(message.reward_parts.items())),
        advantage=message.advantage if message.HasField('advantage') else None,
        finish_reason=message.finish_reason,
        prompt_token_count=message.prompt_token_count if message.HasField('prompt_token_count') else None,
        completion_token_count=message.completion_token_count if message.HasField('completion_token_count') else None,
        oldest_version=message.oldest_version if message.HasField('oldest_version') else None,
        newest_version=message.newest_version if message.HasField('newest_version') else None,
        prompt_preview=message.prompt_preview,
        completion_preview=message.completion_preview,
    )


def _logged(rollout_id: str, response: pb.GetRolloutResponse) -> LoggedRollout:
    rollout = response.rollout
    chat = trajectory_from_proto(rollout.prompt_chat) if rollout.HasField('prompt_chat') else None
    return LoggedRollout(
        rollout_id=rollout_id,
        step=response.step,
        group_id=response.group_id,
        index=rollout.index,
        prompt_chat=chat,
        prompt_text=rollout.prompt_text,
        prompt_token_ids=_array(rollout.prompt_token_ids),
        completion_messages=_messages(rollout),
        completion_text=rollout.completion_text,
        token_ids=_array(rollout.token_ids),
        logprobs=_array(rollout.logprobs),
        token_advantages=_array(rollout.token_advantages),
        reward=rollout.reward if rollout.HasField('reward') else None,
        reward_parts=dict(sorted(rollout.reward_parts.items())),
        advantage=rollout.advantage if rollout.HasField('advantage') else None,
        finish_reason=rollout.finish_reason,
        version_spans=[
            VersionSpan(version=span.version, begin_token=span.begin_token, end_token=span.end_token)
            for span in rollout.version_spans
        ],
    )


def _messages(rollout: pb.Rollout) -> Sequence[Message]:
    chat = message_pb2.Trajectory(messages=rollout.completion_messages)
    return trajectory_from_proto(chat).get('messages') or []


def _array(tensor: tensor_pb2.Tensor) -> npt.NDArray[Any] | None:
    """Return the elements of a tensor; None if it is not set."""
    return tensor_from_proto(tensor) if tensor.dtype else None
