"""Whether a completion thinks first and then answers, in tags."""

from twinkle.reward.base import TextReward


class FormatReward(TextReward):
    """1 where `<think>...</think>` is followed by `<answer>...</answer>`, else 0.

    Args:
        prompt_opens_think: whether the prompt ends in `<think>` already, as templates of thinking models let it, so
            that completions do not have it.
    """

    def __init__(self, *, prompt_opens_think: bool = False) -> None:
        self.prompt_opens_think = prompt_opens_think

    def score(self, completion: str) -> float:
        """Return 1.0 where all tags are there in their order."""
        tags = ['<think>', '</think>', '<answer>', '</answer>']
        place = 0
        for tag in tags[1:] if self.prompt_opens_think else tags:
            found = completion.find(tag, place)
            if found < 0:
                return 0.0
            place = found + len(tag)
        return 1.0
