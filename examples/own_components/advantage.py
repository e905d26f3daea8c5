"""A custom advantage: `python -m examples.own_components.advantage`."""

import numpy as np
import numpy.typing as npt

from twinkle.advantage import ADVANTAGES, GroupAdvantage, build_advantage


class MedianAdvantage(GroupAdvantage):
    """The difference between a reward and the median of its group; a median is robust against outliers."""

    def centre(self, rewards_PG: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Subtract the baselines from the rewards of P prompts with G completions each."""
        return rewards_PG - np.median(rewards_PG, axis=1, keepdims=True)


def main() -> None:
    """Compute advantages of two groups of four completions, using the component by class, instance and name."""
    ADVANTAGES.register('median')(MedianAdvantage)
    rewards = [0.0, 0.0, 0.0, 1.0, 0.5, 0.5, 1.0, 1.0]
    for kind, advantage in (
        ('class', build_advantage(MedianAdvantage)),
        ('object', MedianAdvantage(epsilon=1e-6)),
        ('name', build_advantage('median')),
    ):
        print(f'{kind}: {advantage(rewards, num_generations=4, scale="none").tolist()}')


if __name__ == '__main__':
    main()
