"""Limits that no row of a dataset may break, whatever it says."""

import re

from twinkle.preprocessor.base import Row
from twinkle.preprocessor.errors import InvalidArguments
from twinkle.preprocessor.quality.base import Drop, QualityFilter
from twinkle.preprocessor.quality.chat import messages_of, said

_BROKEN = re.compile('[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufffd\ud800-\udfff]+')
"""Control characters, surrogates, and what stands where a byte could not be decoded."""


class HardFilter(QualityFilter):
    """Keeps chats whose number of messages and length are within bounds, and whose text was decoded well."""

    def __init__(
        self,
        *,
        min_messages: int = 1,
        max_messages: int = 1000,
        min_characters: int = 1,
        max_characters: int = 1_000_000,
        max_broken_share: float = 0.01,
    ) -> None:
        """Set the bounds, which are themselves allowed.

        Args:
            max_characters: of all messages together, thoughts and tool calls among them.
            max_broken_share: of characters that are no text: control characters and those that were not decoded.

        Raises:
            InvalidArguments: a bound is negative, or a lower one above its upper one.
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
        """Return the first bound that the row breaks."""
        messages = messages_of(row)
        if len(messages) < self.min_messages:
            return Drop('too_few_messages', f'{len(messages)}, at least {self.min_messages} are asked for')
        if len(messages) > self.max_messages:
            return Drop('too_many_messages', f'{len(messages)}, at most {self.max_messages} are allowed')
        texts = [text for index, message in enumerate(messages) for text in said(message, index)]
        characters = sum(map(len, texts))
        if characters < self.min_characters:
            return Drop('too_short', f'{characters} characters, at least {self.min_characters} are asked for')
        if characters > self.max_characters:
            return Drop('too_long', f'{characters} characters, at most {self.max_characters} are allowed')
        return self._broken(texts, characters)

    def _broken(self, texts: list[str], characters: int) -> Drop | None:
        broken = sum(len(run) for text in texts for run in _BROKEN.findall(text))
        if broken <= self.max_broken_share * characters:
            return None
        return Drop('broken_text', f'{broken} of {characters} characters are no text')
