"""Operations: one ordered training verb on one adapter. Each verb is a value."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt

from services.model.domain.loader_batch import BatchReference, LoaderCursor
from services.model.domain.training_config import LossChoice, TrainingConfig
from twinkle.data_format import InputFeature


@dataclass(frozen=True, kw_only=True)
class ForwardOptions:
    """How a forward pass is run."""

    temperature: float = 1.0
    is_adapter_disabled: bool = False
    is_logprobs_returned: bool = True


@dataclass(frozen=True, kw_only=True)
class ForwardOnly:
    """Log-probabilities and loss; no gradient, no change of state."""

    features: Sequence[InputFeature]
    options: ForwardOptions = ForwardOptions()
    loss: LossChoice | None = None
    """Of this batch alone; None for the adapter's."""


@dataclass(frozen=True, kw_only=True)
class Forward:
    """A forward pass whose activations are kept for CalculateLoss and Backward."""

    features: Sequence[InputFeature]
    options: ForwardOptions = ForwardOptions()


@dataclass(frozen=True, kw_only=True)
class CalculateLoss:
    """The loss of the last Forward."""


@dataclass(frozen=True, kw_only=True)
class Backward:
    """Adds the gradient of the last loss, or of given gradients of log-probabilities."""

    logprob_gradients: Sequence[npt.NDArray[np.float32]] = ()
    """float32 [T] for each example of the last Forward; empty for the configured loss."""


@dataclass(frozen=True, kw_only=True)
class ForwardBackward:
    """Forward, loss and backward in one; adds to the accumulated gradient."""

    features: Sequence[InputFeature]
    options: ForwardOptions = ForwardOptions()
    loss: LossChoice | None = None
    """Of this batch alone; None for the adapter's."""


@dataclass(frozen=True, kw_only=True)
class ClipGradNorm:
    """Scales the accumulated gradient down to a norm."""

    max_grad_norm: float = 1.0
    """Infinity reports the norm and limits nothing."""
    norm_type: float = 2.0
    max_grad_value: float | None = None
    """Each element is first limited to plus or minus this; None for no limit."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """Applies the accumulated gradient."""

    learning_rate: float | None = None
    """Of this step alone; None is the optimizer's."""
    is_health_returned: bool = False
    optimizer_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Other arguments of the optimizer for this step alone, by name."""


@dataclass(frozen=True, kw_only=True)
class ZeroGrad:
    """Drops the accumulated gradient."""


@dataclass(frozen=True, kw_only=True)
class LrStep:
    """Moves the schedule."""


@dataclass(frozen=True, kw_only=True)
class ClipGradAndStep:
    """ClipGradNorm, Step, ZeroGrad and LrStep in one."""

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
    """Reports what the metrics gathered, and begins anew."""

    is_training: bool = True


@dataclass(frozen=True, kw_only=True)
class Configure:
    """Changes how the adapter is trained."""

    training_config: TrainingConfig


@dataclass(frozen=True, kw_only=True)
class Save:
    """Saves a durable checkpoint."""

    name: str
    is_optimizer_included: bool = False
    is_overwrite_allowed: bool = False
    ttl: timedelta | None = None
    consumed_train_samples: int | None = None
    """The caller's data cursor, kept with the optimizer."""
    user_metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    """The owner's labels."""
    stored_bytes_limit: int | None = None
    """The tenant's quota, where the gateway found it used up."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """Replaces the adapter's weights by a checkpoint's."""

    checkpoint_path: str
    is_optimizer_included: bool = False


@dataclass(frozen=True, kw_only=True)
class PublishVersion:
    """Makes the current weights the next version."""

    is_pinned: bool = False
    dtype: str | None = None
    """Element type of the published weights, a name of `twinkle.checkpoint_engine`; None for the trainer's own."""


@dataclass(frozen=True, kw_only=True)
class Undo:
    """Goes back by optimizer steps."""

    step_count: int
    """At least 1."""


@dataclass(frozen=True, kw_only=True)
class ExportMerged:
    """Writes base and adapter merged, as a plain model folder."""

    name: str


BatchVerb = ForwardOnly | ForwardBackward
"""Verbs that share a pass with those of other adapters."""
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
"""Verbs that the engine alone carries out; replaying one does the same again, to the bit."""
StateVerb = Save | Load | PublishVersion | Undo | ExportMerged
"""Verbs that need more than the engine; they are never replayed."""
Verb = ComputeVerb | StateVerb


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One ordered training verb on one adapter."""

    adapter_id: str
    sequence_number: int
    """Counts from 1 within the adapter."""
    verb: Verb
    fingerprint: str
    """Digest of the request's content: tells a repeat from another operation with the same number."""
    payload: bytes = field(default=b'', repr=False)
    """The request as it came, for the journal; opaque here. A batch that was fetched for it is in it."""
    batch_reference: BatchReference | None = None
    """Where its batch is, if that is a loader's."""
    next_cursor: LoaderCursor | None = None
    """The position after that batch; None until it was fetched."""

    @property
    def request_bytes(self) -> int:
        """Size of the request."""
        return len(self.payload)

    @property
    def is_batch_missing(self) -> bool:
        """Whether its batch is still to be fetched from a loader."""
        return self.batch_reference is not None and self.next_cursor is None

    @property
    def request_id(self) -> str:
        """Makes a repeat of it harmless at other services."""
        return f'{self.adapter_id}:{self.sequence_number}:{self.fingerprint}'

    @property
    def verb_name(self) -> str:
        """Name of the verb, for logs and traces."""
        return type(self.verb).__name__


def token_count(verb: Any) -> int:
    """Return the number of tokens a verb brings."""
    return sum(len(feature['input_ids']) for feature in getattr(verb, 'features', ()))
