"""Answers that repeat themselves until they are cut off."""

from collections.abc import Mapping
from typing import Any

from twinkle.preprocessor.base import Row
from twinkle.preprocessor.errors import InvalidArguments
from twinkle.preprocessor.quality.base import Drop, QualityFilter
from twinkle.preprocessor.quality.chat import COLUMN, messages_of, said
from twinkle.preprocessor.quality.repetition import find_run, repeated_line


class DeadLoopFilter(QualityFilter):
    """Keeps chats whose assistant does not go round in circles.

    It does where a text repeats one unit over and over, where most lines of a text are the same, or where turn after
    turn says the same. Only what the assistant says is looked at.
    """

    def __init__(
        self,
        *,
        min_characters: int = 400,
        min_repeats: int = 8,
        max_line_share: float = 0.5,
        max_equal_turns: int = 4,
    ) -> None:
        """Set from when on it is a loop.

        Args:
            min_characters: fewest characters of all repeats together.
            min_repeats: fewest repeats of a unit or line.
            max_line_share: most of a text's lines that may be the same.
            max_equal_turns: most turns of the assistant in a row that may say, or call, the same.

        Raises:
            InvalidArguments: a bound is out of its range.
        """
        for name, value, least in (
            ('min_characters', min_characters, 4),
            ('min_repeats', min_repeats, 2),
            ('max_equal_turns', max_equal_turns, 1),
        ):
            if value < least:
                raise InvalidArguments(f'{name} must be at least {least}, got {value}')
        if not 0.0 < max_line_share <= 1.0:
            raise InvalidArguments(f'max_line_share must be in (0, 1], got {max_line_share}')
        self.min_characters, self.min_repeats = min_characters, min_repeats
        self.max_line_share, self.max_equal_turns = max_line_share, max_equal_turns

    def drop_of(self, row: Row) -> Drop | None:
        """Return the first loop."""
        turns = [(index, message) for index, message in enumerate(messages_of(row)) if message['role'] == 'assistant']
        for index, message in turns:
            for text in said(message, index):
                problem = self._loop_in(text)
                if problem is not None:
                    return Drop('repeated_text', f'{COLUMN}[{index}] {problem}')
        return self._equal_turns(turns)

    def _loop_in(self, text: str) -> str | None:
        run = find_run(text, min_characters=self.min_characters, min_repeats=self.min_repeats)
        if run is not None:
            unit = text[run.begin : run.begin + min(run.period, 40)]
            return f'says {unit!r} {run.repeats} times from character {run.begin} on'
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
            now = said(message, index)
            count = count + 1 if now == last else 1
            last = now
            if count > self.max_equal_turns:
                return Drop('repeated_turns', f'{COLUMN}[{index}] is turn {count} in a row that says the same')
        return None
