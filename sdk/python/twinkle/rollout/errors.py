"""What rollouts refuse, as facts a caller can act on."""


class RolloutError(Exception):
    """Base of everything this room raises by itself."""


class InvalidTool(RolloutError, ValueError):
    """A function cannot be offered as a tool."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f'tool {name}: {problem}')
        self.name, self.problem = name, problem

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.name, self.problem)


class InvalidArguments(RolloutError, ValueError):
    """A call does not fit the tool's schema; the model is told so."""


class ChatCannotGoOn(RolloutError, ValueError):
    """The chat template renders no turn after an assistant's, so that a chat cannot have several."""


class UnknownVersion(RolloutError, ValueError):
    """A sample does not say which versions drew it, so that nobody can tell how old it is."""

    def __init__(self, index: int) -> None:
        super().__init__(
            f'samples[{index}].version_spans is empty; keep the spans of its SampledSequence, or leave the sample out'
        )
        self.index = index

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return type(self), (self.index,)


class CallbackFailed(RolloutError, RuntimeError):
    """A callback that was given to a rollout raised; its own error is the cause."""

    def __init__(self, name: str, error: BaseException) -> None:
        super().__init__(f'{name} raised {type(error).__name__}: {error}')
        self.name, self.error = name, error
        """Which option it was given as, and what it raised."""

    def __reduce__(self) -> tuple[type, tuple[str, BaseException]]:
        return type(self), (self.name, self.error)


class PipelineClosed(RolloutError, RuntimeError):
    """The pipeline was closed; make another."""

    def __init__(self) -> None:
        super().__init__('the pipeline is closed; make another one to go on')

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()
