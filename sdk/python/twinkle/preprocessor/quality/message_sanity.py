"""Filter for the roles and order of messages, and for tool calls and their results."""

import json
from collections.abc import Mapping
from typing import Any, Literal

from twinkle.preprocessor.base import Row
from twinkle.preprocessor.errors import InvalidArguments
from twinkle.preprocessor.quality.base import Drop, QualityFilter
from twinkle.preprocessor.quality.chat import COLUMN, calls_of, content_of, messages_of, reasoning_of

_ROLES = ('system', 'user', 'assistant', 'tool')
_ENDS = ('any', 'assistant', 'user')


class MessageSanityFilter(QualityFilter):
    """Keeps chats that a template can render and that a model can learn from.

    A system message must be the first message, and the first other message must be from the user. Only tool results and
    messages with tool calls may have no content. Only the assistant may call tools. Every call must have a name and,
    before the next turn, a result. The id of a call, if given, must be unique, and its arguments must be an object or
    the JSON text of an object.
    """

    def __init__(
        self, *, ends_with: Literal['any', 'assistant', 'user'] = 'any', is_final_call_allowed: bool = False
    ) -> None:
        """Set the requirements on the end of a chat.

        Args:
            ends_with: required role of the last message: 'assistant' for training, 'user' for sampling, or 'any'.
                Default: 'any'.
            is_final_call_allowed: whether the last message may be a tool call without a result. Default: False.

        Raises:
            InvalidArguments: the value of `ends_with` is unknown.
        """
        if ends_with not in _ENDS:
            raise InvalidArguments(f'ends_with must be one of {", ".join(_ENDS)}, got {ends_with!r}')
        self.ends_with = ends_with
        self.is_final_call_allowed = is_final_call_allowed

    def drop_of(self, row: Row) -> Drop | None:
        """Return a `Drop` for the first problem of the chat, or None."""
        messages = messages_of(row)
        if not messages:
            return Drop('no_messages')
        return self._order(messages) or _emptiness(messages) or self._calls(messages)

    def _order(self, messages: list[Mapping[str, Any]]) -> Drop | None:
        roles = [message['role'] for message in messages]
        for index, role in enumerate(roles):
            if role not in _ROLES:
                return Drop('unknown_role', f'{COLUMN}[{index}].role is {role[:40]!r}')
            if role == 'system' and index:
                return Drop('late_system', f'{COLUMN}[{index}] is a system message after other messages')
        others = [role for role in roles if role != 'system']
        if not others or others[0] != 'user':
            return Drop('no_user_first', 'the first message after the system message must have the role user')
        if self.ends_with not in {'any', roles[-1]}:
            return Drop('wrong_end', f'the last message has the role {roles[-1]}, not {self.ends_with}')
        return None

    def _calls(self, messages: list[Mapping[str, Any]]) -> Drop | None:
        pending: list[str | None] = []
        seen: set[str] = set()
        for index, message in enumerate(messages):
            if message['role'] == 'tool':
                if not _resolve_call(message, pending):
                    return Drop('result_without_call', f'{COLUMN}[{index}] does not belong to a pending tool call')
                continue
            if pending:
                return Drop('call_without_result', f'{COLUMN}[{index}] precedes the result of a tool call')
            calls = calls_of(message, index)
            problem = _problem_of_calls(message, calls, seen)
            if problem is not None:
                return Drop(problem, f'{COLUMN}[{index}].tool_calls')
            pending = [_id_of(call) for call in calls]
        is_final_call = bool(pending) and messages[-1]['role'] == 'assistant' and self.is_final_call_allowed
        return (
            Drop('call_without_result', 'the chat ends without the result') if pending and not is_final_call else None
        )


def _emptiness(messages: list[Mapping[str, Any]]) -> Drop | None:
    for index, message in enumerate(messages):
        is_blank = not content_of(message, index).strip() and not calls_of(message, index)
        # A tool may return an empty result.
        if is_blank and message['role'] != 'tool':
            thought = ' except for reasoning' if reasoning_of(message, index).strip() else ''
            return Drop('empty_message', f'{COLUMN}[{index}] with the role {message["role"]} is empty{thought}')
    return None


def _problem_of_calls(message: Mapping[str, Any], calls: list[Mapping[str, Any]], seen: set[str]) -> str | None:
    if calls and message['role'] != 'assistant':
        return 'call_of_another_role'
    for call in calls:
        function = call.get('function', call)
        if not isinstance(function, Mapping) or not isinstance(function.get('name'), str) or not function['name']:
            return 'call_without_name'
        if not _is_object(function.get('arguments')):
            return 'bad_arguments'
        call_id = _id_of(call)
        if call_id is not None and call_id in seen:
            return 'repeated_call_id'
        seen.update([call_id] if call_id is not None else [])
    return None


def _resolve_call(message: Mapping[str, Any], pending: list[str | None]) -> bool:
    """Remove from `pending` the call that a result answers, and return whether there is such a call.

    A result answers the call with the same id, or the first call if the result or all calls have no id.
    """
    if not pending:
        return False
    given = message.get('tool_call_id')
    wanted = given if isinstance(given, str) and given else None
    if wanted is None or all(call_id is None for call_id in pending):
        pending.pop(0)
        return True
    if wanted not in pending:
        return False
    pending.remove(wanted)
    return True


def _id_of(call: Mapping[str, Any]) -> str | None:
    call_id = call.get('id')
    return call_id if isinstance(call_id, str) and call_id else None


def _is_object(arguments: Any) -> bool:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            return False
    return arguments is None or isinstance(arguments, Mapping)
