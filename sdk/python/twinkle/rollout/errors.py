"""Errors of rollouts."""

from twinkle.errors import error_class


class RolloutError(Exception):
    """Base class of the errors that rollouts raise."""


@error_class('tool {name}: {problem}')
class InvalidTool(RolloutError, ValueError):
    """A function cannot be offered as a tool."""

    name: str
    problem: str


class InvalidArguments(RolloutError, ValueError):
    """A call does not match the tool's schema; the model receives the message."""


class ChatCannotGoOn(RolloutError, ValueError):
    """The chat template omits earlier assistant turns, so the chat cannot continue."""


@error_class('samples[{index}].version_spans is empty; copy the spans of its SampledSequence, or remove the sample')
class UnknownVersion(RolloutError, ValueError):
    """A sample does not name the adapter versions that sampled it, so its age is unknown."""

    index: int


@error_class()
class CallbackFailed(RolloutError, RuntimeError):
    """A callback of a rollout raised an exception, which is the cause of this error."""

    name: str
    """Option that the callback was passed as."""
    error: BaseException
    """Exception that the callback raised."""

    def __str__(self) -> str:
        return f'{self.name} raised {type(self.error).__name__}: {self.error}'


@error_class('the pipeline is closed; create a new pipeline')
class PipelineClosed(RolloutError, RuntimeError):
    """The pipeline was closed."""


class InvalidTurnRequest(RolloutError, ValueError):
    """A program's request for a turn is malformed or unsupported."""


@error_class('another turn of this chat is being sampled; ask for one turn at a time, or repeat the same request')
class TurnInProgress(RolloutError, RuntimeError):
    """A program asks for a turn while a different request of its chat waits for one."""


@error_class('the program of the environment failed: {problem}')
class ProgramFailed(RolloutError, RuntimeError):
    """The program of an environment failed, or does something that rollouts do not support."""

    problem: str
