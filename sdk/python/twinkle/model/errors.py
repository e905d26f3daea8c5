"""Errors of the trainer. Invalid input is refused before anything changes."""

from twinkle.errors import error_class


class TrainerError(Exception):
    """Base class of the errors in this module."""


@error_class('there is no adapter {adapter_id!r}; create it first')
class UnknownAdapter(TrainerError, KeyError):
    """No adapter with that id exists."""

    adapter_id: str


@error_class('adapter {adapter_id!r} exists already; choose another id or remove it first')
class AdapterExists(TrainerError, ValueError):
    """An adapter with that id exists already."""

    adapter_id: str


@error_class('full-parameter training cannot share the model; remove the other adapter first')
class ModelLeased(TrainerError, RuntimeError):
    """A full-parameter adapter cannot share the model with another adapter."""


@error_class('adapter {adapter_id!r} needs {needs}')
class AdapterNotReady(TrainerError, RuntimeError):
    """The adapter lacks something that the method needs."""

    adapter_id: str
    needs: str


@error_class()
class LossNotFinite(TrainerError, ArithmeticError):
    """A loss, a gradient or the accumulated gradient is not finite; no gradient was added."""

    adapter_id: str
    feature_index: int | None
    """Position of the feature in the batch; None if the batch as a whole is affected."""

    def __str__(self) -> str:
        location = 'the batch' if self.feature_index is None else f'features[{self.feature_index}]'
        return f'the loss or the gradient of {location} is not finite; no gradient was added'


@error_class('memory ran out for {token_count} tokens that must run at once; at most {token_limit} may fit')
class BatchTooLarge(TrainerError):
    """Memory ran out for a part of a batch that cannot be divided further; nothing was changed."""

    token_count: int
    token_limit: int


class SnapshotMismatch(TrainerError, ValueError):
    """A saved state does not fit the adapter or is malformed; nothing was changed."""


class InvalidArgument(TrainerError, ValueError):
    """An argument is invalid, or cannot be used with the adapter or the model."""


class InvalidStepOptions(InvalidArgument):
    """An option for one step is unknown, out of range, or would change the optimizer's state. Nothing was changed."""


@error_class('{loss} failed on this batch: {problem}')
class LossFailed(InvalidArgument):
    """A loss raised an exception or returned something that is not a loss; no gradient was added."""

    adapter_id: str
    loss: str
    problem: str


@error_class('{metric} failed on this batch: {problem}')
class MetricFailed(InvalidArgument):
    """A metric raised an exception while it accumulated a batch; no gradient was added."""

    metric: str
    problem: str
