"""Conversion of rollouts to the messages that the server stores."""

import numpy as np
import numpy.typing as npt

from twinkle.api.gateway.v1 import rollout_service_pb2 as pb
from twinkle.api.sampler.v1 import sampling_pb2
from twinkle.api.tensor.v1 import tensor_pb2
from twinkle.tracking.rollouts import TrackedRollout
from twinkle_client.convert.tensors import tensor_to_proto
from twinkle_client.convert.trajectories import trajectory_to_proto


def rollout_to_proto(rollout: TrackedRollout) -> pb.Rollout:
    """Return the message of a rollout.

    Raises:
        ValueError: A message of the chat cannot be sent.
    """
    completion = trajectory_to_proto({'messages': rollout.completion_messages}) if rollout.completion_messages else None
    return pb.Rollout(
        index=rollout.index,
        prompt_chat=None if rollout.prompt_chat is None else trajectory_to_proto(rollout.prompt_chat),
        prompt_text=rollout.prompt_text,
        prompt_token_ids=_tensor(rollout.prompt_token_ids),
        completion_messages=completion.messages if completion else (),
        completion_text=rollout.completion_text,
        token_ids=_tensor(rollout.token_ids),
        logprobs=_tensor(rollout.logprobs),
        token_advantages=_tensor(rollout.token_advantages),
        reward=rollout.reward,
        reward_parts=rollout.reward_parts,
        advantage=rollout.advantage,
        finish_reason=rollout.finish_reason,
        version_spans=[
            sampling_pb2.VersionSpan(version=span.version, begin_token=span.begin_token, end_token=span.end_token)
            for span in rollout.version_spans
        ],
    )


def _tensor(values: npt.NDArray[np.int32 | np.float32] | None) -> tensor_pb2.Tensor | None:
    return None if values is None else tensor_to_proto(values)
