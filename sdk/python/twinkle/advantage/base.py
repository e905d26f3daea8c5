"""What an advantage is, and the ones that compare a prompt's completions with each other."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from twinkle.advantage.errors import InvalidAdvantageInput

FloatVector = npt.NDArray[np.float64]
Scale = Literal['group', 'batch', 'none']
LARGEST = 1e100
"""Numbers beyond it have no squares, so that no standard deviation of them is finite."""


class Advantage(ABC):
    """Turns rewards into advantages; subclasses say of what shape.

    Concurrency: estimators keep no state between calls.
    """

    @abstractmethod
    def __call__(self, rewards: Any, *args: Any, **kwargs: Any) -> Any:
        """Return advantages.

        Raises:
            InvalidAdvantageInput: an argument is of no use.
        """


class GroupAdvantage(Advantage):
    """Advantages against a baseline of the completions of one prompt. Subclasses override `centre`.

    Args:
        epsilon: added to a standard deviation before anything is divided by it; above 0.
    """

    def __init__(self, *, epsilon: float = 1e-4) -> None:
        if not epsilon > 0:
            raise InvalidAdvantageInput('epsilon', f'must be above 0, got {epsilon}')
        self.epsilon = epsilon

    @abstractmethod
    def centre(self, rewards_PG: FloatVector) -> FloatVector:
        """Return rewards less their baselines: P prompts, G completions of each."""

    def __call__(
        self, rewards: Sequence[float] | npt.ArrayLike, num_generations: int = 1, scale: Scale = 'group'
    ) -> FloatVector:
        """Return one advantage for each reward, in their order.

        Args:
            rewards: one number for each completion, the completions of a prompt next to each other.
            num_generations: completions of each prompt. 1: the whole batch is one group.
            scale: what advantages are divided by: the standard deviation (of a sample) of the group's rewards, that
                of the batch's, or nothing. Where all of those rewards are equal, advantages are 0 or unscaled.

        Raises:
            InvalidAdvantageInput: rewards are none, not finite or in several columns, do not divide into groups, or
                leave a completion without another one to be compared with.
        """
        rewards_PG = _grouped(read_vector('rewards', rewards), num_generations)
        centred_PG = self.centre(rewards_PG)
        if scale == 'group':
            centred_PG = centred_PG / (rewards_PG.std(axis=1, ddof=1, keepdims=True) + self.epsilon)
        elif scale == 'batch':
            centred_PG = centred_PG / (rewards_PG.std(ddof=1) + self.epsilon)
        elif scale != 'none':
            raise InvalidAdvantageInput('scale', f"must be 'group', 'batch' or 'none', got {scale!r}")
        # Rounding must not make a preference of equal rewards.
        is_equal_P1 = np.ptp(rewards_PG, axis=1, keepdims=True) == 0
        return np.where(is_equal_P1, 0.0, centred_PG).reshape(-1)


def read_vector(field: str, values: Any) -> FloatVector:
    """Return values as one row of finite numbers.

    Raises:
        InvalidAdvantageInput: they are not that; it names `field`.
    """
    try:
        # Tensors of any device have a list form; numpy alone would refuse those of an accelerator.
        listed = values.tolist() if hasattr(values, 'tolist') else values
        vector = np.asarray(listed, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidAdvantageInput(field, 'must be a list of numbers') from error
    if vector.ndim != 1:
        raise InvalidAdvantageInput(field, f'must be one row of numbers; add up several kinds, got {vector.shape}')
    if not vector.size:
        raise InvalidAdvantageInput(field, 'is empty; give at least one number')
    is_odd = ~(np.abs(vector) <= LARGEST)
    if is_odd.any():
        index = int(is_odd.argmax())
        raise InvalidAdvantageInput(f'{field}[{index}]', f'must be within {LARGEST:g}, got {vector[index]}')
    return vector


def _grouped(rewards: FloatVector, num_generations: int) -> FloatVector:
    """Return rewards with a row for each prompt."""
    given: Any = num_generations
    if isinstance(given, bool) or not isinstance(given, int | np.integer) or given < 1:
        raise InvalidAdvantageInput('num_generations', f'must be a whole number, at least 1, got {given!r}')
    if rewards.size % num_generations:
        raise InvalidAdvantageInput('num_generations', f'must divide the {rewards.size} rewards, got {num_generations}')
    group = num_generations if num_generations > 1 else rewards.size
    if group < 2:
        raise InvalidAdvantageInput('rewards', 'must be two or more; a single one has nothing to be compared with')
    return rewards.reshape(-1, group)
