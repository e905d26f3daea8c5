"""Separates a growing text into ordinary text and tool calls. The joined result does not depend on the pieces."""

from collections.abc import Collection, Iterator, Sequence

from twinkle.data_format import Tool
from twinkle.tool_calls.found_call import FoundCall, StreamedParser, partial_marker

_THINK_OPEN, _THINK_CLOSE = '<think>', '</think>'
_SHORT_CHARACTERS = 4096
"""A longer undecided text is parsed again only when it has grown by an eighth, so that the total time is linear."""


class ToolCallStream:
    """Reads one sampled turn in pieces of any size.

    Text is returned as soon as it cannot belong to a call. Whitespace before a call is dropped. Calls inside the
    thought at the beginning of the turn, malformed calls, and calls to unknown tools are ordinary text.

    Args:
        parser: format of the calls.
        tools: the tools offered to the model.
        names: names of the tools that may be called; calls of other tools are text.
        is_thought_open: whether the prompt ends inside the thought.
    """

    def __init__(
        self, parser: StreamedParser, *, tools: Sequence[Tool], names: Collection[str], is_thought_open: bool = False
    ) -> None:
        self._parser = parser
        self._tools = tools
        self._names = names
        self._thought: bool | None = is_thought_open or None
        """Whether the text is inside the thought; None until the first characters show this."""
        self._held = ''
        self._spaces = ''
        """Whitespace that is dropped if a call follows."""
        self._has_text = self._is_after_call = False
        self._skipped_characters = 0
        """Number of characters to wait for before the held text is parsed again."""

    def feed(self, text: str, *, is_last: bool = False) -> list[str | FoundCall]:
        """Add text, and return the parts that are now final.

        Args:
            text: the next piece of the turn.
            is_last: whether the turn ends here; everything that was held is then returned.
        """
        self._held += text
        if self._thought is not False:
            return self._feed_thought(is_last=is_last)
        self._skipped_characters -= len(text)
        if self._skipped_characters > 0 and not is_last:
            return []
        return list(self._final_parts(is_last=is_last))

    def _feed_thought(self, *, is_last: bool) -> list[str | FoundCall]:
        if self._thought is None:
            beginning = self._held.lstrip()[: len(_THINK_OPEN)]
            if not is_last and beginning != _THINK_OPEN and _THINK_OPEN.startswith(beginning):
                return []
            self._thought = beginning == _THINK_OPEN
            return self.feed('', is_last=is_last)
        close = self._held.find(_THINK_CLOSE)
        end = close + len(_THINK_CLOSE) if close >= 0 else partial_marker(self._held, _THINK_CLOSE)
        end = len(self._held) if is_last and close < 0 else end
        thought, self._held = self._held[:end], self._held[end:]
        self._thought = close < 0
        parts: list[str | FoundCall] = [thought] if thought else []
        return parts if self._thought else [*parts, *self.feed('', is_last=is_last)]

    def _final_parts(self, *, is_last: bool) -> Iterator[str | FoundCall]:
        """Yield the parts of the held text before the first undecided character."""
        end = len(self._held) if is_last else self._parser.pending(self._held)
        position = 0
        for call in self._parser.find(self._held, self._tools):
            if call.end > end:
                break
            if call.name in self._names:
                yield from self._text(self._held[position : call.begin], is_before_call=True)
                yield call
                self._is_after_call = True
                position = call.end
        yield from self._text(self._held[position:end])
        self._held = self._held[end:]
        length = len(self._held)
        self._skipped_characters = length // 8 if length > _SHORT_CHARACTERS else 0
        if is_last and self._spaces and not self._is_after_call:
            yield self._spaces

    def _text(self, text: str, *, is_before_call: bool = False) -> Iterator[str]:
        """Yield text without the whitespace at its end, which is held until the next part."""
        text = self._spaces + text
        if self._is_after_call and not self._has_text:
            text = text.lstrip()
        stripped = text.rstrip()
        self._spaces = '' if is_before_call else text[len(stripped) :]
        if stripped:
            yield stripped
            self._has_text, self._is_after_call = True, False
