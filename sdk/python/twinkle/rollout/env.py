"""The seam between a rollout and what answers the model: a world, a game, a set of tools."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from twinkle.data_format import Message, Trajectory


@dataclass(frozen=True, kw_only=True)
class EnvStep:
    """What an environment answers to one message of the model."""

    messages: Sequence[Message] = ()
    """What the model reads before its next turn. Empty is legal only where the chat is done."""
    reward: float = 0.0
    """Earned by this message; those of a chat are added up."""
    is_done: bool = False
    """Whether the chat ends here."""
    facts: Mapping[str, float] = field(default_factory=dict[str, float])
    """Numbers worth reporting; those of a chat are added up by name."""


class Env(Protocol):
    """One chat's world. A rollout makes one for each sample, so it may keep state.

    Concurrency: its verbs are called one after the other, perhaps from different threads.
    """

    def reset(self, trajectory: Trajectory, *, seed: int | None) -> Trajectory:
        """Return the chat to begin with.

        Args:
            trajectory: what the rollout was given; not to be changed.
            seed: of the world, the same for all samples of one trajectory. None: any.
        """
        ...

    def step(self, message: Message, *, is_last: bool) -> EnvStep:
        """Answer what the model said.

        Args:
            message: the model's turn, as text.
            is_last: whether the model gets no further turn whatever the answer, so that it need only be scored.
        """
        ...

    def close(self) -> None:
        """Give back what the chat holds. Called once, also after an error."""
        ...


EnvFactory = Callable[[], Env]
"""Makes a world for one sample."""


class SingleTurn:
    """The world of plain completions: done after the first turn, with nothing earned."""

    def reset(self, trajectory: Trajectory, *, seed: int | None) -> Trajectory:
        """Return the chat as it is."""
        del seed
        return trajectory

    def step(self, message: Message, *, is_last: bool) -> EnvStep:
        """End the chat."""
        del message, is_last
        return EnvStep(is_done=True)

    def close(self) -> None:
        """Hold nothing."""
