"""Tool calls as lines `Action:` and `Action Input:` (Yao et al. 2022, "ReAct", in the form that agents use today)."""

import re
from collections.abc import Iterator, Sequence
from typing import Any, cast

from twinkle.data_format import Tool
from twinkle.tool_calls.found_call import FoundCall
from twinkle.tool_calls.json_value import read_json, value_end

_ACTION = re.compile(r'^[ \t]*+Action:[ \t]*+([^\n]++)\n[ \t]*+Action Input:[ \t]*+', re.MULTILINE)
_NEXT = re.compile(r'^[ \t]*+(?:Thought|Action|Action Input|Observation|Final Answer):', re.MULTILINE)


class ReActParser:
    """Parser of `Action: name` followed, on the next line, by `Action Input:` with a JSON object or text.

    Text becomes the single argument `input`, and ends before the next line that starts with a keyword of the format,
    such as `Observation:`.
    """

    name = 'react'

    def find(self, text: str, tools: Sequence[Tool]) -> Iterator[FoundCall]:
        """Yield the complete calls in `text`, in linear time; an input that begins with `{` must be a JSON object."""
        del tools
        position = 0
        while action := _ACTION.search(text, position):
            position = begin = action.end()
            if text.startswith('{', begin):
                position, is_closed = value_end(text, begin)
                arguments = _object(text[begin:position]) if is_closed else None
            else:
                following = _NEXT.search(text, begin)
                position = following.start() if following else len(text)
                arguments = {'input': text[begin:position].strip()}
            name = action[1].strip()
            if arguments is not None and name:
                yield FoundCall(action.start(), position, name, arguments)


def _object(text: str) -> dict[str, Any] | None:
    try:
        return cast('dict[str, Any]', read_json(text))
    except ValueError:
        return None
