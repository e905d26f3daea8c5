"""A custom reward: `python -m examples.own_components.reward`."""

from twinkle.reward import REWARDS, AnswerReward, build_reward


class BriefAnswerReward(AnswerReward):
    """1 for the correct answer, minus `price` for every additional word, at least 0; 0 for a wrong answer."""

    def __init__(self, ground_truth_key: str = 'ground_truth', *, price: float = 0.1) -> None:
        super().__init__(ground_truth_key)
        self.price = price

    def score(self, completion: str, ground_truth: str) -> float:
        """Return the reward of a completion."""
        words = completion.lower().replace('.', ' ').split()
        return max(1 - self.price * (len(words) - 1), 0.0) if ground_truth.lower() in words else 0.0


def main() -> None:
    """Score three answers with the reward given by class, instance and name."""
    REWARDS.register('brief')(BriefAnswerReward)
    answers = ('Paris.', 'I think that it is Paris.', 'Lyon.')
    trajectories = [
        {'messages': [{'role': 'assistant', 'content': answer}], 'user_data': [('ground_truth', 'Paris')]}
        for answer in answers
    ]
    for kind, reward in (
        ('class', build_reward(BriefAnswerReward, price=0.2)),
        ('object', BriefAnswerReward()),
        ('name', build_reward('brief')),
    ):
        print(f'{kind}: {[round(score, 2) for score in reward(trajectories)]}')


if __name__ == '__main__':
    main()
