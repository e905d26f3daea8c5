"""Filter for the number of messages, the length and the encoding of chats."""

import re

from twinkle.preprocessor.base import Row
from twinkle.preprocessor.errors import InvalidArguments
from twinkle.preprocessor.quality.base import Drop, QualityFilter
from twinkle.preprocessor.quality.chat import messages_of, texts_of

_BROKEN = re.compile('[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufffd\ud800-\udfff]+')
"""Control characters, surrogates, and the replacement character of undecodable bytes."""


class HardFilter(QualityFilter):
    """Keeps chats whose number of messages and length are within bounds and whose text was decoded correctly."""

    def __init__(
        self,
        *,
        min_messages: int = 1,
        max_messages: int = 1000,
        min_characters: int = 1,
        max_characters: int = 1_000_000,
        max_broken_share: float = 0.01,
    ) -> None:
        """Set the bounds, which are inclusive.

        Args:
            min_messages: minimum number of messages. Default: 1.
            max_messages: maximum number of messages. Default: 1000.
            min_characters: minimum number of characters in all messages, including reasoning and tool calls. Default:
                1.
            max_characters: maximum number of characters, counted in the same way. Default: 1,000,000.
            max_broken_share: maximum fraction of control and undecodable characters, in [0, 1]. Default: 0.01.

        Raises:
            InvalidArguments: a bound is out of range, or a minimum is above its maximum.
        """
        for name, low, high in (
            ('messages', min_messages, max_messages),
            ('characters', min_characters, max_characters),
        ):
            if not 0 <= low <= high:
                raise InvalidArguments(f'min_{name} must be at least 0 and at most max_{name}, got {low} and {high}')
        if not 0.0 <= max_broken_share <= 1.0:
            raise InvalidArguments(f'max_broken_share must be in [0, 1], got {max_broken_share}')
        self.min_messages, self.max_messages = min_messages, max_messages
        self.min_characters, self.max_characters = min_characters, max_characters
        self.max_broken_share = max_broken_share

    def drop_of(self, row: Row) -> Drop | None:
        """Return a `Drop` for the first bound that the row violates, or None."""
        messages = messages_of(row)
        if len(messages) < self.min_messages:
            return Drop('too_few_messages', f'{len(messages)} messages, minimum {self.min_messages}')
        if len(messages) > self.max_messages:
            return Drop('too_many_messages', f'{len(messages)} messages, maximum {self.max_messages}')
        texts = [text for index, message in enumerate(messages) for text in texts_of(message, index)]
        characters = sum(map(len, texts))
        if characters < self.min_characters:
            return Drop('too_short', f'{characters} characters, minimum {self.min_characters}')
        if characters > self.max_characters:
            return Drop('too_long', f'{characters} characters, maximum {self.max_characters}')
        return self._broken(texts, characters)

    def _broken(self, texts: list[str], characters: int) -> Drop | None:
        broken = sum(len(run) for text in texts for run in _BROKEN.findall(text))
        if broken <= self.max_broken_share * characters:
            return None
        return Drop('broken_text', f'{broken} of {characters} characters are control or undecodable characters')
