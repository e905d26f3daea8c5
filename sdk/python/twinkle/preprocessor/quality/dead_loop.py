"""Filter for answers that repeat themselves."""

from collections.abc import Mapping
from typing import Any

from twinkle.preprocessor.base import Row
from twinkle.preprocessor.errors import InvalidArguments
from twinkle.preprocessor.quality.base import Drop, QualityFilter
from twinkle.preprocessor.quality.chat import COLUMN, messages_of, texts_of
from twinkle.preprocessor.quality.repetition import find_run, repeated_line


class DeadLoopFilter(QualityFilter):
    """Removes chats in which the assistant repeats itself.

    A chat is removed if a text of the assistant repeats one unit many times, or contains the same line too often. It is
    also removed if too many consecutive assistant turns are equal.
    """

    def __init__(
        self,
        *,
        min_characters: int = 400,
        min_repeats: int = 8,
        max_line_share: float = 0.5,
        max_equal_turns: int = 4,
    ) -> None:
        """Set the thresholds.

        Args:
            min_characters: minimum number of characters of all repeats together, at least 4. Default: 400.
            min_repeats: minimum number of repeats of a unit or line, at least 2. Default: 8.
            max_line_share: maximum fraction of a text's lines that may be equal, in (0, 1]. Default: 0.5.
            max_equal_turns: maximum number of consecutive equal assistant turns, at least 1. Default: 4.

        Raises:
            InvalidArguments: a threshold is out of range.
        """
        for name, value, minimum in (
            ('min_characters', min_characters, 4),
            ('min_repeats', min_repeats, 2),
            ('max_equal_turns', max_equal_turns, 1),
        ):
            if value < minimum:
                raise InvalidArguments(f'{name} must be at least {minimum}, got {value}')
        if not 0.0 < max_line_share <= 1.0:
            raise InvalidArguments(f'max_line_share must be in (0, 1], got {max_line_share}')
        self.min_characters, self.min_repeats = min_characters, min_repeats
        self.max_line_share, self.max_equal_turns = max_line_share, max_equal_turns

    def drop_of(self, row: Row) -> Drop | None:
        """Return a `Drop` for the first repetition, or None."""
        turns = [(index, message) for index, message in enumerate(messages_of(row)) if message['role'] == 'assistant']
        for index, message in turns:
            for text in texts_of(message, index):
                problem = self._repetition_in(text)
                if problem is not None:
                    return Drop('repeated_text', f'{COLUMN}[{index}] {problem}')
        return self._equal_turns(turns)

    def _repetition_in(self, text: str) -> str | None:
        run = find_run(text, min_characters=self.min_characters, min_repeats=self.min_repeats)
        if run is not None:
            unit = text[run.begin : run.begin + min(run.period, 40)]
            return f'repeats {unit!r} {run.repeats} times, starting at character {run.begin}'
        found = repeated_line(
            text,
            min_characters=self.min_characters,
            min_repeats=self.min_repeats,
            max_share=self.max_line_share,
        )
        return None if found is None else f'has the line {found[0][:40]!r} {found[1]} times'

    def _equal_turns(self, turns: list[tuple[int, Mapping[str, Any]]]) -> Drop | None:
        last: list[str] | None = None
        count = 0
        for index, message in turns:
            now = texts_of(message, index)
            count = count + 1 if now == last else 1
            last = now
            if count > self.max_equal_turns:
                return Drop('repeated_turns', f'{COLUMN}[{index}] is number {count} of consecutive equal turns')
        return None
