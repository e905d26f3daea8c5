"""The task of the recipes `ppo` and `async_rl`: writing in capital letters, which models learn in a few steps."""

from collections.abc import Iterable
from typing import Any

from twinkle.reward import TextReward

TOPICS = ('the sea', 'bread', 'a cat', 'the moon', 'rain', 'a bridge', 'winter', 'music', 'a train', 'the colour blue')
HELD_OUT_TOPICS = ('a river', 'the sun', 'a horse', 'snow')


class ShoutReward(TextReward):
    """The fraction of capital letters in a completion."""

    def score(self, completion: str) -> float:
        return sum(character.isupper() for character in completion) / max(len(completion), 1)


def chats_about(topics: Iterable[str]) -> list[dict[str, Any]]:
    """Return, for each topic, a chat that requests capital letters."""
    return [
        {'messages': [{'role': 'user', 'content': f'In capital letters, write about {topic}.'}]} for topic in topics
    ]
