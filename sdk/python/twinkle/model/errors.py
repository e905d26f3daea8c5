"""What the trainer refuses. Bad input is refused before anything is changed."""


class TrainerError(Exception):
    """Base of what the trainer raises of its own."""


class UnknownAdapter(TrainerError, KeyError):
    """No adapter of that id exists."""

    def __init__(self, adapter_id: str) -> None:
        super().__init__(adapter_id)
        self.adapter_id = adapter_id

    def __str__(self) -> str:
        return f'there is no adapter {self.adapter_id!r}; create it first'


class AdapterExists(TrainerError, ValueError):
    """An adapter of that id exists already."""

    def __init__(self, adapter_id: str) -> None:
        super().__init__(f'adapter {adapter_id!r} exists already')
        self.adapter_id = adapter_id


class ModelLeased(TrainerError, RuntimeError):
    """A full-parameter adapter shares the model with no other."""

    def __init__(self) -> None:
        super().__init__('full-parameter training has the model for itself; delete the other adapter first')


class AdapterNotReady(TrainerError, RuntimeError):
    """The adapter lacks what the verb needs."""

    def __init__(self, adapter_id: str, needs: str) -> None:
        super().__init__(f'adapter {adapter_id!r} needs {needs}')
        self.adapter_id = adapter_id
        self.needs = needs


class LossNotFinite(TrainerError, ArithmeticError):
    """A forward pass gave a loss or gradient that is not finite; no gradient was added."""

    def __init__(self, adapter_id: str, feature_index: int | None) -> None:
        place = 'the batch' if feature_index is None else f'features[{feature_index}]'
        super().__init__(f'the loss of {place} is not finite; no gradient was added')
        self.adapter_id = adapter_id
        self.feature_index = feature_index


class BatchTooLarge(TrainerError):
    """Memory ran out for a part of a batch that cannot be divided any further; nothing was changed."""

    def __init__(self, token_count: int, token_limit: int) -> None:
        super().__init__(
            f'memory ran out for {token_count} tokens that must run at once; at most {token_limit} may fit'
        )
        self.token_count = token_count
        self.token_limit = token_limit

    def __reduce__(self) -> tuple[type['BatchTooLarge'], tuple[int, int]]:
        """Pickle by the arguments."""
        return type(self), (self.token_count, self.token_limit)


class SnapshotMismatch(TrainerError, ValueError):
    """A saved state does not fit the adapter or is malformed; nothing was changed."""


class InvalidArgument(TrainerError, ValueError):
    """An argument is out of range."""


class InvalidStepOptions(InvalidArgument):
    """An option for one step is unknown, shapes the optimizer's state, or is out of range; nothing was changed."""


class LossFailed(InvalidArgument):
    """A loss raised, or returned what is no loss; no gradient was added."""

    def __init__(self, adapter_id: str, loss: str, problem: str) -> None:
        super().__init__(f'{loss} failed on this batch: {problem}')
        self.adapter_id, self.loss, self.problem = adapter_id, loss, problem

    def __reduce__(self) -> tuple[type['LossFailed'], tuple[str, str, str]]:
        """Pickle by the arguments."""
        return type(self), (self.adapter_id, self.loss, self.problem)


class MetricFailed(InvalidArgument):
    """A metric raised as it took a batch in; no gradient was added."""

    def __init__(self, metric: str, problem: str) -> None:
        super().__init__(f'{metric} failed on this batch: {problem}')
        self.metric, self.problem = metric, problem

    def __reduce__(self) -> tuple[type['MetricFailed'], tuple[str, str]]:
        """Pickle by the arguments."""
        return type(self), (self.metric, self.problem)
