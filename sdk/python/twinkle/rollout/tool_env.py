"""An environment that runs the model's tool calls. The chat ends with the first turn that contains no call."""

from collections.abc import Callable, Sequence
from typing import cast

from twinkle.data_format import Message, ToolCall, Trajectory
from twinkle.rollout.env import EnvStep
from twinkle.rollout.tool import ToolFailure
from twinkle.rollout.tool_manager import ToolManager

ParseCalls = Callable[[str], Sequence[ToolCall]]
"""Returns the tool calls in a message of the model; raises a ValueError if a call cannot be parsed."""


class ToolEnv:
    """Runs tools for one chat.

    Facts: `tool_calls`, `tool_failures`, one `tool_<failure>` per kind of failure, and `tool_unreadable` for each turn
    whose calls cannot be parsed.

    Args:
        tools: tools that the model may call. They replace the tools listed in the chat.
        parse: parser of tool calls, such as `Template.parse_tool_call`.
    """

    def __init__(self, tools: ToolManager, parse: ParseCalls) -> None:
        self._tools, self._parse = tools, parse

    def reset(self, trajectory: Trajectory, *, seed: int | None) -> Trajectory:
        """Return the chat with the tools of this environment instead of the listed tools."""
        del seed
        return cast('Trajectory', {**trajectory, 'tools': self._tools.specs})

    def step(self, message: Message, *, is_last: bool) -> EnvStep:
        """Run the calls of a turn in order. Calls in the last turn are skipped: the model cannot read their results."""
        try:
            calls = self._parse(str(message.get('content', '')))
        except ValueError as error:
            reply: Message = {'role': 'tool', 'content': f'Error: the call cannot be read: {error}'}
            return EnvStep(messages=[reply], facts={'tool_calls': 1.0, 'tool_failures': 1.0, 'tool_unreadable': 1.0})
        if not calls or is_last:
            return EnvStep(is_done=not calls)
        results = [self._tools.call(call) for call in calls]
        failures = [result.failure for result in results if result.failure]
        facts = {'tool_calls': float(len(calls)), 'tool_failures': float(len(failures))}
        facts |= {f'tool_{kind}': float(failures.count(kind)) for kind in ToolFailure if kind in failures}
        return EnvStep(messages=[result.message for result in results], facts=facts)

    def close(self) -> None:
        """Return immediately, because there are no resources to release."""
