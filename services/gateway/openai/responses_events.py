"""Responses of `/v1/responses`: output items, complete or as events that build them."""

from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Any

from twinkle_services.gateway.openai.choices import CalledTool, ChoiceDelta, TokenUsage
from twinkle_services.gateway.openai.completion_responses import attribution
from twinkle_services.gateway.openai.models import ResolvedModel
from twinkle_services.gateway.openai.request import GenerationRequest
from twinkle_services.kit.ids import new_id

_Event = dict[str, Any]


class ItemWriter:
    """Implements `Writer` for `/v1/responses`. The single choice becomes messages and function calls."""

    def __init__(self, request: GenerationRequest, model: ResolvedModel, *, usage: TokenUsage, created: int) -> None:
        """Prepare a response; `usage` must be complete after the last delta, and `created` is in seconds since 1970."""
        self._model = model
        self._usage = usage
        self._head = {
            'id': new_id('resp'),
            'object': 'response',
            'created_at': created,
            'model': request.model,
            'error': None,
            'previous_response_id': None,
            'store': False,
            'truncation': 'disabled',
            **request.repeated,
        }
        self._output: list[dict[str, Any]] = []
        self._texts: list[str] = []
        """Pieces of the text of the open message."""
        self._open_id = ''
        """Id of the message that is being written; empty without an open message."""
        self._event_count = 0

    async def complete(self, deltas: AsyncIterator[ChoiceDelta]) -> dict[str, Any]:
        """Return the response after the last delta."""
        last: _Event = {}
        async for event in self.chunks(deltas):
            last = event
        return last['response']

    async def chunks(self, deltas: AsyncIterator[ChoiceDelta]) -> AsyncGenerator[_Event, None]:
        """Yield the events. They begin after the first delta, so that earlier errors have an HTTP status."""
        finish_reason: str | None = None
        async for delta in deltas:
            if not self._event_count:
                for kind in ('response.created', 'response.in_progress'):
                    yield self._event(kind, response=self._document('in_progress'))
            finish_reason = delta.finish_reason
            for event in self._read(delta):
                yield event
        yield self._final(finish_reason)

    def _read(self, delta: ChoiceDelta) -> Iterator[_Event]:
        """Add a part of the choice, and yield its events."""
        is_last = delta.finish_reason is not None
        # A response without calls has a message even if its text is empty.
        if delta.text or (is_last and not delta.calls and not self._output):
            if not self._open_id:
                yield from self._open_message()
            self._texts.append(delta.text)
            yield self._text_event('response.output_text.delta', delta=delta.text, logprobs=[])
        if self._open_id and (delta.calls or is_last):
            yield from self._close_message('incomplete' if delta.finish_reason == 'length' else 'completed')
        for call in delta.calls:
            yield from self._add_call(call)

    def _open_message(self) -> Iterator[_Event]:
        self._open_id = new_id('msg')
        yield self._event(
            'response.output_item.added', output_index=len(self._output), item=self._message('in_progress')
        )
        yield self._text_event('response.content_part.added', part=_text_part(''))

    def _close_message(self, status: str) -> Iterator[_Event]:
        text = ''.join(self._texts)
        part = _text_part(text)
        yield self._text_event('response.output_text.done', text=text, logprobs=[])
        yield self._text_event('response.content_part.done', part=part)
        item = self._message(status, part)
        self._open_id = ''
        self._texts.clear()
        yield from self._add_item(item)

    def _message(self, status: str, *parts: dict[str, Any]) -> dict[str, Any]:
        return {'id': self._open_id, 'type': 'message', 'role': 'assistant', 'status': status, 'content': list(parts)}

    def _add_call(self, call: CalledTool) -> Iterator[_Event]:
        item = {'id': new_id('fc'), 'type': 'function_call', 'call_id': call.call_id, 'name': call.name}
        begun = {**item, 'status': 'in_progress', 'arguments': ''}
        place = {'output_index': len(self._output), 'item_id': item['id']}
        yield self._event('response.output_item.added', output_index=len(self._output), item=begun)
        yield self._event('response.function_call_arguments.delta', **place, delta=call.arguments)
        yield self._event('response.function_call_arguments.done', **place, arguments=call.arguments, name=call.name)
        yield from self._add_item({**item, 'status': 'completed', 'arguments': call.arguments})

    def _add_item(self, item: dict[str, Any]) -> Iterator[_Event]:
        self._output.append(item)
        yield self._event('response.output_item.done', output_index=len(self._output) - 1, item=item)

    def _final(self, finish_reason: str | None) -> _Event:
        status = 'incomplete' if finish_reason == 'length' else 'completed'
        details = {'reason': 'max_output_tokens'} if status == 'incomplete' else None
        document = self._document(status, incomplete_details=details, usage=self._usage_fields())
        return self._event(
            f'response.{status}', response={**document, 'twinkle': attribution(self._model, self._usage)}
        )

    def _document(self, status: str, **fields: Any) -> dict[str, Any]:
        absent = {'incomplete_details': None, 'usage': None}
        return {**self._head, **absent, 'status': status, 'output': list(self._output), **fields}

    def _usage_fields(self) -> dict[str, Any]:
        usage = self._usage
        return {
            'input_tokens': usage.prompt_tokens,
            'input_tokens_details': {'cached_tokens': usage.cached_tokens},
            'output_tokens': usage.completion_tokens,
            'output_tokens_details': {'reasoning_tokens': 0},
            'total_tokens': usage.prompt_tokens + usage.completion_tokens,
        }

    def _text_event(self, kind: str, **fields: Any) -> _Event:
        return self._event(kind, item_id=self._open_id, output_index=len(self._output), content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> _Event:
        self._event_count += 1
        return {'type': kind, 'sequence_number': self._event_count - 1, **fields}


def _text_part(text: str) -> dict[str, Any]:
    return {'type': 'output_text', 'text': text, 'annotations': [], 'logprobs': []}
