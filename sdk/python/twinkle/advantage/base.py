"""`Advantage`, the base class of all estimators, and `GroupAdvantage`, which compares completions of the same prompt.

Legend: P prompts, G completions per prompt.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from twinkle.advantage.errors import InvalidAdvantageInput

FloatVector = npt.NDArray[np.float64]
Scale = Literal['group', 'batch', 'none']
LARGEST = 1e100
"""Maximum magnitude of input values. A standard deviation squares the values, and squares above 1e308 overflow."""


class Advantage(ABC):
    """Estimator that turns rewards into advantages; subclasses define the shapes.

    Concurrency: estimators keep no state between calls, so threads may share an estimator.
    """

    @abstractmethod
    def __call__(self, rewards: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the advantages of rewards.

        Raises:
            InvalidAdvantageInput: an argument is invalid.
        """


class GroupAdvantage(Advantage):
    """Advantages relative to a baseline, which is computed from completions of the same prompt.

    Subclasses implement `centre`.

    Args:
        epsilon: added to the standard deviation before division; above 0.

    Raises:
        InvalidAdvantageInput: `epsilon` is out of range.
    """

    def __init__(self, *, epsilon: float = 1e-4) -> None:
        if not epsilon > 0:
            raise InvalidAdvantageInput('epsilon', f'must be above 0, got {epsilon}')
        self.epsilon = epsilon

    @abstractmethod
    def centre(self, rewards_PG: FloatVector) -> FloatVector:
        """Return each reward minus its baseline, float64 [P, G]."""

    def __call__(
        self, rewards: Sequence[float] | npt.ArrayLike, num_generations: int = 1, scale: Scale = 'group'
    ) -> FloatVector:
        """Return one advantage per reward, float64, in the order of the rewards.

        Args:
            rewards: one number per completion; completions of one prompt are adjacent.
            num_generations: completions per prompt; 1 treats the batch as one group.
            scale: rewards whose sample standard deviation divides the advantages: 'group' for the rewards of the same
                group, 'batch' for all rewards, 'none' for no division. Advantages of a group of equal rewards are
                always 0.

        Raises:
            InvalidAdvantageInput: rewards are empty, too large, not finite or not one-dimensional; they cannot be
                divided into groups of at least two completions; `num_generations` is not an integer of at least 1; or
                `scale` is unknown.
        """
        rewards_PG = _grouped(read_vector('rewards', rewards), num_generations)
        centred_PG = self.centre(rewards_PG)
        if scale == 'group':
            centred_PG = centred_PG / (rewards_PG.std(axis=1, ddof=1, keepdims=True) + self.epsilon)
        elif scale == 'batch':
            centred_PG = centred_PG / (rewards_PG.std(ddof=1) + self.epsilon)
        elif scale != 'none':
            raise InvalidAdvantageInput('scale', f"must be 'group', 'batch' or 'none', got {scale!r}")
        # Rounding must not create a preference between equal rewards.
        is_equal_P1 = np.ptp(rewards_PG, axis=1, keepdims=True) == 0
        return np.where(is_equal_P1, 0.0, centred_PG).reshape(-1)


def read_vector(field: str, values: Any) -> FloatVector:
    """Return the values as a float64 vector of finite numbers.

    Raises:
        InvalidAdvantageInput: the values are empty, not one-dimensional, or not numbers of at most `LARGEST` in
            magnitude. The error names `field`.
    """
    try:
        # `tolist` works for tensors on any device; numpy cannot convert tensors on an accelerator.
        listed = values.tolist() if hasattr(values, 'tolist') else values
        vector = np.asarray(listed, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidAdvantageInput(field, 'must be a list of numbers') from error
    if vector.ndim != 1:
        raise InvalidAdvantageInput(
            field, f'must be one-dimensional, got shape {vector.shape}; add up the rewards of each completion'
        )
    if not vector.size:
        raise InvalidAdvantageInput(field, 'is empty; give at least one number')
    is_invalid = ~(np.abs(vector) <= LARGEST)
    if is_invalid.any():
        index = int(is_invalid.argmax())
        problem = f'must be at most {LARGEST:g} in magnitude, got {vector[index]}'
        raise InvalidAdvantageInput(f'{field}[{index}]', problem)
    return vector


def _grouped(rewards: FloatVector, num_generations: int) -> FloatVector:
    """Return the rewards with one row per prompt."""
    given: Any = num_generations
    if isinstance(given, bool) or not isinstance(given, int | np.integer) or given < 1:
        raise InvalidAdvantageInput('num_generations', f'must be an integer of at least 1, got {given!r}')
    if rewards.size % num_generations:
        raise InvalidAdvantageInput('num_generations', f'must divide the {rewards.size} rewards, got {num_generations}')
    group = num_generations if num_generations > 1 else rewards.size
    if group < 2:
        raise InvalidAdvantageInput('rewards', 'must have at least two completions per group to compare')
    return rewards.reshape(-1, group)
