"""The interface of environments, which respond to the model's turns: tasks, games, or sets of tools."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from twinkle.data_format import Message, Trajectory


@dataclass(frozen=True, kw_only=True)
class EnvStep:
    """An environment's response to one message of the model."""

    messages: Sequence[Message] = ()
    """Messages that the model reads before its next turn. May be empty only if the chat is done or this was the model's
    last turn."""
    reward: float = 0.0
    """Reward of this message. The rewards of a chat are summed."""
    is_done: bool = False
    """Whether the chat ends with this step."""
    facts: Mapping[str, float] = field(default_factory=dict[str, float])
    """Numbers to report. The facts of a chat are summed by name."""


class Env(Protocol):
    """The environment of one chat. A rollout creates one per sample, so an environment may have state.

    Concurrency: methods are called one at a time, possibly from different threads.
    """

    def reset(self, trajectory: Trajectory, *, seed: int | None) -> Trajectory:
        """Return the initial chat.

        Args:
            trajectory: the trajectory passed to the rollout; must not be modified.
            seed: seed of the environment, the same for all samples of a trajectory. None: unseeded.
        """
        ...

    def step(self, message: Message, *, is_last: bool) -> EnvStep:
        """Respond to a message of the model.

        Args:
            message: the model's turn, as text.
            is_last: whether this is the model's last turn. The model then does not read the messages of this step.
        """
        ...

    def close(self) -> None:
        """Release the environment's resources. Called once, even after an error."""
        ...


EnvFactory = Callable[[], Env]
"""Creates the environment of one sample."""


class SingleTurn:
    """The environment of plain completions: the chat ends after the first turn, with reward 0."""

    def reset(self, trajectory: Trajectory, *, seed: int | None) -> Trajectory:
        """Return the trajectory unchanged."""
        del seed
        return trajectory

    def step(self, message: Message, *, is_last: bool) -> EnvStep:
        """End the chat."""
        del message, is_last
        return EnvStep(is_done=True)

    def close(self) -> None:
        """Return immediately, because there are no resources to release."""
