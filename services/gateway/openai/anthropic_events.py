"""Responses of Anthropic's `/v1/messages`: content blocks, complete or as events that build them, and errors."""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from typing import Any

from twinkle_services.gateway.openai.choices import CalledTool, ChoiceDelta, TokenUsage
from twinkle_services.gateway.openai.completion_responses import attribution
from twinkle_services.gateway.openai.errors import OpenAiErrors
from twinkle_services.gateway.openai.models import ResolvedModel
from twinkle_services.gateway.openai.request import GenerationRequest
from twinkle_services.kit.errors import DomainError
from twinkle_services.kit.ids import new_id

_Event = dict[str, Any]
_STOP_REASONS = {'stop': 'end_turn', 'length': 'max_tokens', 'tool_calls': 'tool_use'}
_TYPES = {
    401: 'authentication_error',
    403: 'permission_error',
    404: 'not_found_error',
    413: 'request_too_large',
    429: 'rate_limit_error',
    503: 'overloaded_error',
}


class MessageErrors(OpenAiErrors):
    """Errors in Anthropic's form, `{"type": "error", "error": {type, message}}`, with the fields of OpenAI's form."""

    def body_of(self, error: DomainError, *, request_id: str) -> dict[str, Any]:
        status = self.status_of(error)
        kind = _TYPES.get(status, 'api_error' if status >= 500 else 'invalid_request_error')
        fields = {**super().body_of(error, request_id=request_id)['error'], 'type': kind}
        return {'type': 'error', 'error': fields, 'request_id': request_id}


class MessageWriter:
    """Implements `Writer` for `/v1/messages`. The single choice becomes blocks of text and of tool use."""

    def __init__(self, request: GenerationRequest, model: ResolvedModel, *, usage: TokenUsage, created: int) -> None:
        """Prepare a response; `usage` must be complete after the last delta, and `created` is not part of messages."""
        del created
        self._model = model
        self._usage = usage
        self._head = {'id': new_id('msg'), 'type': 'message', 'role': 'assistant', 'model': request.model}
        self._blocks: list[dict[str, Any]] = []
        self._texts: list[str] | None = None
        """Pieces of the open block of text; None without an open block."""

    async def complete(self, deltas: AsyncIterator[ChoiceDelta]) -> dict[str, Any]:
        """Return the response after the last delta."""
        end: _Event = {}
        async for event in self.chunks(deltas):
            end = event if event['type'] == 'message_delta' else end
        head = {**self._head, 'content': self._blocks, **end['delta']}
        return {**head, 'usage': end['usage'], 'twinkle': end['twinkle']}

    async def chunks(self, deltas: AsyncIterator[ChoiceDelta]) -> AsyncGenerator[_Event, None]:
        """Yield the events. They begin after the first delta, so that earlier errors have an HTTP status."""
        is_begun = False
        end: Mapping[str, Any] = {}
        async for delta in deltas:
            if not is_begun:
                is_begun = True
                yield self._begin()
            for event in self._read(delta):
                yield event
            end = _end_of(delta)
        usage = self._usage_fields()
        twinkle = attribution(self._model, self._usage)
        yield {'type': 'message_delta', 'delta': dict(end), 'usage': usage, 'twinkle': twinkle}
        yield {'type': 'message_stop'}

    def _begin(self) -> _Event:
        message: dict[str, Any] = {**self._head, 'content': [], 'stop_reason': None, 'stop_sequence': None}
        return {'type': 'message_start', 'message': {**message, 'usage': {**self._usage_fields(), 'output_tokens': 0}}}

    def _read(self, delta: ChoiceDelta) -> Iterator[_Event]:
        """Add a part of the choice, and yield its events."""
        if delta.text:
            if self._texts is None:
                self._texts = []
                yield self._start({'type': 'text', 'text': ''})
            self._texts.append(delta.text)
            yield self._delta({'type': 'text_delta', 'text': delta.text})
        if self._texts is not None and (delta.calls or delta.finish_reason is not None):
            text, self._texts = ''.join(self._texts), None
            yield self._stop({'type': 'text', 'text': text})
        for call in delta.calls:
            yield from self._add_call(call)

    def _add_call(self, call: CalledTool) -> Iterator[_Event]:
        block = {'type': 'tool_use', 'id': call.call_id, 'name': call.name, 'input': json.loads(call.arguments)}
        yield self._start({**block, 'input': {}})
        yield self._delta({'type': 'input_json_delta', 'partial_json': call.arguments})
        yield self._stop(block)

    def _start(self, block: dict[str, Any]) -> _Event:
        return {'type': 'content_block_start', 'index': len(self._blocks), 'content_block': block}

    def _delta(self, delta: dict[str, Any]) -> _Event:
        return {'type': 'content_block_delta', 'index': len(self._blocks), 'delta': delta}

    def _stop(self, block: dict[str, Any]) -> _Event:
        self._blocks.append(block)
        return {'type': 'content_block_stop', 'index': len(self._blocks) - 1}

    def _usage_fields(self) -> dict[str, Any]:
        """Return the counts; unlike in OpenAI's API, input tokens do not include cached ones."""
        usage = self._usage
        return {
            'input_tokens': usage.prompt_tokens - usage.cached_tokens,
            'cache_read_input_tokens': usage.cached_tokens,
            'output_tokens': usage.completion_tokens,
        }


def _end_of(delta: ChoiceDelta) -> Mapping[str, Any]:
    return {'stop_reason': _STOP_REASONS.get(delta.finish_reason or ''), 'stop_sequence': None}
