"""Errors raised by rollouts."""


class RolloutError(Exception):
    """Base class of the errors in this package."""


class InvalidTool(RolloutError, ValueError):
    """A function cannot be offered as a tool."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f'tool {name}: {problem}')
        self.name, self.problem = name, problem

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.name, self.problem)


class InvalidArguments(RolloutError, ValueError):
    """The arguments of a call do not match the tool's schema. The message is sent to the model."""


class ChatCannotGoOn(RolloutError, ValueError):
    """The chat template cannot render a turn after an assistant turn, so multi-turn chats are impossible."""


class UnknownVersion(RolloutError, ValueError):
    """A sample has no version spans, so its age is unknown."""

    def __init__(self, index: int) -> None:
        super().__init__(
            f'samples[{index}].version_spans is empty; copy the spans of its SampledSequence, or remove the sample'
        )
        self.index = index

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return type(self), (self.index,)


class CallbackFailed(RolloutError, RuntimeError):
    """A callback passed to a rollout raised an error, which is also the `__cause__`.

    Args:
        name: name of the option that holds the callback.
        error: the error that the callback raised.
    """

    def __init__(self, name: str, error: BaseException) -> None:
        super().__init__(f'{name} raised {type(error).__name__}: {error}')
        self.name, self.error = name, error

    def __reduce__(self) -> tuple[type, tuple[str, BaseException]]:
        return type(self), (self.name, self.error)


class PipelineClosed(RolloutError, RuntimeError):
    """The pipeline was closed and cannot be used again."""

    def __init__(self) -> None:
        super().__init__('the pipeline is closed; create a new one')

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()
