"""The format reward: a thinking section followed by an answer, both in tags."""

from twinkle.reward.base import TextReward


class FormatReward(TextReward):
    """1 if the completion contains `<think>...</think>` followed by `<answer>...</answer>`, else 0.

    Args:
        prompt_opens_think: whether the prompt already ends in `<think>`, as with some chat templates. Completions then
            do not contain this tag.
    """

    def __init__(self, *, prompt_opens_think: bool = False) -> None:
        self.prompt_opens_think = prompt_opens_think

    def score(self, completion: str) -> float:
        """Return 1.0 if all tags occur in order, else 0.0."""
        tags = ['<think>', '</think>', '<answer>', '</answer>']
        position = 0
        for tag in tags[1:] if self.prompt_opens_think else tags:
            found = completion.find(tag, position)
            if found < 0:
                return 0.0
            position = found + len(tag)
        return 1.0
