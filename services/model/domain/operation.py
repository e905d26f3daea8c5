"""Operations: ordered training verbs on an adapter. Each verb is a value.

The messages of the same names in `twinkle.api.model.v1` document the fields.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt

from twinkle.data_format import InputFeature
from twinkle_services.model.domain.loader_batch import BatchReference, LoaderCursor
from twinkle_services.model.domain.training_config import LossChoice, TrainingConfig


@dataclass(frozen=True, kw_only=True)
class ForwardOptions:
    """Options of a forward pass."""

    temperature: float = 1.0
    is_adapter_disabled: bool = False
    is_logprobs_returned: bool = True
    micro_batch_size: int | None = None
    is_routed_experts_returned: bool = False


@dataclass(frozen=True, kw_only=True)
class ForwardOnly:
    """Computes log-probabilities and loss, without gradient or change of state."""

    features: Sequence[InputFeature]
    options: ForwardOptions = ForwardOptions()
    loss: LossChoice | None = None
    """Loss of this batch; None for the adapter's loss."""


@dataclass(frozen=True, kw_only=True)
class Forward:
    """Runs a forward pass and stores its activations for CalculateLoss and Backward."""

    features: Sequence[InputFeature]
    options: ForwardOptions = ForwardOptions()


@dataclass(frozen=True, kw_only=True)
class CalculateLoss:
    """Computes the loss of the last Forward."""


@dataclass(frozen=True, kw_only=True)
class Backward:
    """Backpropagates the last loss, or given gradients of log-probabilities, and adds to the accumulated gradient."""

    logprob_gradients: Sequence[npt.NDArray[np.float32]] = ()
    """float32 [T] per example of the last Forward; empty to use the configured loss."""


@dataclass(frozen=True, kw_only=True)
class ForwardBackward:
    """Runs Forward, CalculateLoss and Backward, and adds to the accumulated gradient."""

    features: Sequence[InputFeature]
    options: ForwardOptions = ForwardOptions()
    loss: LossChoice | None = None
    """Loss of this batch; None for the adapter's loss."""


@dataclass(frozen=True, kw_only=True)
class ClipGradNorm:
    """Clips the accumulated gradient."""

    max_grad_norm: float = 1.0
    """Maximum norm; with infinity, the norm is only measured."""
    norm_type: float = 2.0
    max_grad_value: float | None = None
    """Maximum absolute value, to which each element is clipped first; None to leave the elements unclipped."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """Applies the accumulated gradient."""

    learning_rate: float | None = None
    """Learning rate of this step; None for the learning rate of the schedule."""
    is_health_returned: bool = False
    optimizer_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Other optimizer arguments of this step, by name."""


@dataclass(frozen=True, kw_only=True)
class ZeroGrad:
    """Drops the accumulated gradient."""


@dataclass(frozen=True, kw_only=True)
class LrStep:
    """Advances the learning-rate schedule."""


@dataclass(frozen=True, kw_only=True)
class ClipGradAndStep:
    """Runs ClipGradNorm, Step, ZeroGrad and LrStep."""

    max_grad_norm: float = 1.0
    norm_type: float = 2.0
    max_grad_value: float | None = None
    is_health_returned: bool = False
    learning_rate: float | None = None
    """See `Step`."""
    optimizer_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """See `Step`."""


@dataclass(frozen=True, kw_only=True)
class CalculateMetric:
    """Reports the metrics and resets them."""

    is_training: bool = True


@dataclass(frozen=True, kw_only=True)
class Configure:
    """Changes the adapter's training configuration."""

    training_config: TrainingConfig


@dataclass(frozen=True, kw_only=True)
class Save:
    """Saves a durable checkpoint."""

    name: str
    is_optimizer_included: bool = False
    is_overwrite_allowed: bool = False
    ttl: timedelta | None = None
    consumed_train_samples: int | None = None
    """The caller's data cursor, saved with the optimizer."""
    user_metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    """Labels that the caller attaches to the checkpoint."""
    stored_bytes_limit: int | None = None
    """The tenant's storage quota in bytes, which the gateway sets only while the quota is exhausted."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """Replaces the adapter's weights with those of a checkpoint."""

    checkpoint_path: str
    is_optimizer_included: bool = False


@dataclass(frozen=True, kw_only=True)
class PublishVersion:
    """Publishes the current weights as the next version."""

    is_pinned: bool = False
    dtype: str | None = None
    """Data type of the published weights, see `twinkle.checkpoint_engine`; None for the trainer's data type."""


@dataclass(frozen=True, kw_only=True)
class Undo:
    """Reverts optimizer steps."""

    step_count: int
    """Number of steps, at least 1."""


@dataclass(frozen=True, kw_only=True)
class ExportMerged:
    """Merges the adapter into a copy of the base model, and writes the result as a plain model folder."""

    name: str


BatchVerb = ForwardOnly | ForwardBackward
"""Verbs that can share a pass with verbs of other adapters."""
ComputeVerb = (
    ForwardOnly
    | Forward
    | CalculateLoss
    | Backward
    | ForwardBackward
    | ClipGradNorm
    | Step
    | ZeroGrad
    | LrStep
    | ClipGradAndStep
    | CalculateMetric
    | Configure
)
"""Verbs that need only the engine; replaying a verb gives a bitwise equal result."""
StateVerb = Save | Load | PublishVersion | Undo | ExportMerged
"""Verbs that need more than the engine; they are never replayed."""
Verb = ComputeVerb | StateVerb


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One ordered training verb on one adapter."""

    adapter_id: str
    sequence_number: int
    """Position in the adapter's order, from 1."""
    verb: Verb
    fingerprint: str
    """Digest of the request's content, which distinguishes a repeat from another operation with the same number."""
    payload: bytes = field(default=b'', repr=False)
    """The serialized request for the journal, including a fetched batch; the domain does not parse it."""
    batch_reference: BatchReference | None = None
    """Reference to the operation's batch in the data service; None if the batch does not come from a loader."""
    next_cursor: LoaderCursor | None = None
    """The position after that batch; None until the batch is fetched."""

    @property
    def request_bytes(self) -> int:
        """Size of the serialized request in bytes."""
        return len(self.payload)

    @property
    def is_batch_missing(self) -> bool:
        """Whether the operation's batch must still be fetched from a loader."""
        return self.batch_reference is not None and self.next_cursor is None

    @property
    def request_id(self) -> str:
        """Request id at other services, which makes repeats idempotent."""
        return f'{self.adapter_id}:{self.sequence_number}:{self.fingerprint}'

    @property
    def verb_name(self) -> str:
        """Name of the verb, for logs and traces."""
        return type(self.verb).__name__


def token_count(verb: Any) -> int:
    """Return the number of tokens in a verb's batch; 0 if the verb has no batch."""
    return sum(len(feature['input_ids']) for feature in getattr(verb, 'features', ()))
