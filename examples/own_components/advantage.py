"""An advantage of one's own: `python -m examples.own_components.advantage`."""

import numpy as np
import numpy.typing as npt

from twinkle.advantage import ADVANTAGES, GroupAdvantage, build_advantage


class MedianAdvantage(GroupAdvantage):
    """How far each reward is from its group's median, which one lucky completion does not move."""

    def centre(self, rewards_PG: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return rewards less their baselines: P prompts, G completions of each."""
        return rewards_PG - np.median(rewards_PG, axis=1, keepdims=True)


def main() -> None:
    """Compare two groups of four completions by the class, an object and a name."""
    ADVANTAGES.register('median')(MedianAdvantage)
    rewards = [0.0, 0.0, 0.0, 1.0, 0.5, 0.5, 1.0, 1.0]
    for way, advantage in (
        ('class', build_advantage(MedianAdvantage)),
        ('object', MedianAdvantage(epsilon=1e-6)),
        ('name', build_advantage('median')),
    ):
        print(f'{way}: {advantage(rewards, num_generations=4, scale="none").tolist()}')


if __name__ == '__main__':
    main()
