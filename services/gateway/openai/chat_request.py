"""Converts bodies of chat completions to messages of the sampler contract."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from twinkle.api.data.v1 import message_pb2
from twinkle.api.sampler.v1 import sampling_pb2
from twinkle_services.gateway.http.validation import read_model
from twinkle_services.gateway.openai.bodies import SamplingBody
from twinkle_services.gateway.openai.chat_bodies import ChatBody, ChatMessage
from twinkle_services.gateway.openai.request import GenerationRequest, generation_request, sampling_params
from twinkle_services.gateway.openai.tools import ToolUse, forced_output, prompt_tools, tool_use
from twinkle_services.kit.errors import InvalidField
from twinkle_services.kit.rpc.json_values import struct_of
from twinkle_services.kit.rpc.message_elements import check_elements

_ROLES = {
    'user': message_pb2.ROLE_USER,
    'assistant': message_pb2.ROLE_ASSISTANT,
    'tool': message_pb2.ROLE_TOOL,
}


def chat_request(body: Mapping[str, Any]) -> GenerationRequest:
    """Validate and convert a body of `/v1/chat/completions`.

    Raises:
        InvalidField: a field is wrong; the error has its path.
    """
    given = read_model(ChatBody, body)
    max_tokens = given.max_completion_tokens or given.max_tokens
    if given.max_tokens not in (None, max_tokens):
        raise InvalidField('max_tokens', 'differs from max_completion_tokens; give one of them')
    top_logprobs = (given.top_logprobs or 0) if given.logprobs else None
    choice = given.tool_choice
    use = tool_use(
        [tool.function for tool in given.tools],
        choice.type,
        chosen_name=choice.function.name if choice.function else '',
        is_parallel=given.parallel_tool_calls,
        has_format=given.has_format,
    )
    return conversation_request(
        given,
        given.messages,
        use,
        max_tokens=max_tokens,
        top_logprobs=top_logprobs,
        is_thinking_enabled=given.chat_template_kwargs.enable_thinking,
    )


def conversation_request(
    body: SamplingBody,
    messages: Sequence[ChatMessage],
    use: ToolUse | None,
    *,
    max_tokens: int | None,
    top_logprobs: int | None = None,
    is_thinking_enabled: bool | None = None,
) -> GenerationRequest:
    """Return the request to continue a chat.

    Raises:
        InvalidField: a parameter is out of range, schemas are too large, or there are too many values.
    """
    params = sampling_params(body, max_tokens=max_tokens, top_logprobs=top_logprobs)
    chat = sampling_pb2.ChatPrompt(trajectory=_trajectory(messages, use))
    # Samplers also refuse a chat with too many elements, but only after this process has parsed it on the event loop.
    check_elements(chat.SerializeToString(), chat.DESCRIPTOR, 'body')
    if use is not None and use.is_forced:
        params.structured_output.CopyFrom(forced_output(use))
        # The constraint begins with the first token, and allows no thought before the calls.
        is_thinking_enabled = is_thinking_enabled or False
    if is_thinking_enabled is not None:
        chat.is_thinking_enabled = is_thinking_enabled
    return generation_request(body, (sampling_pb2.Prompt(chat=chat),), params, top_logprobs=top_logprobs, tools=use)


def _trajectory(messages: Sequence[ChatMessage], use: ToolUse | None) -> message_pb2.Trajectory:
    system = list(takewhile(lambda message: message.role in {'system', 'developer'}, messages))
    turns = [_message(message) for message in messages[len(system) :]]
    if system:
        turns.insert(0, _joined(system))
    return message_pb2.Trajectory(messages=turns, tools=prompt_tools(use) if use else ())


def _joined(messages: Iterable[ChatMessage]) -> message_pb2.Message:
    """Return one system message, because chat templates accept only one."""
    text = '\n\n'.join(''.join(part.text for part in message.content or ()) for message in messages)
    return message_pb2.Message(role=message_pb2.ROLE_SYSTEM, parts=[message_pb2.ContentPart(text=text)])


def _message(message: ChatMessage) -> message_pb2.Message:
    native = message_pb2.Message(
        role=_ROLES[message.role],
        parts=[message_pb2.ContentPart(text=part.text) for part in message.content or ()],
        tool_call_id=message.tool_call_id,
        reasoning_content=message.reasoning_content,
    )
    for call in message.tool_calls:
        arguments = struct_of(call.function.arguments)
        native.tool_calls.add(tool_call_id=call.id, name=call.function.name, arguments=arguments)
    return native
