"""Response documents of completions and chats, complete or as a stream of chunks."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any, Protocol

from twinkle_services.gateway.fleet.model_routes import shown_name
from twinkle_services.gateway.openai.choices import (
    CalledTool,
    ChoiceDelta,
    JoinedChoices,
    ScoredToken,
    TokenText,
    TokenUsage,
)
from twinkle_services.gateway.openai.models import ResolvedModel
from twinkle_services.gateway.openai.request import GenerationRequest
from twinkle_services.kit.errors import InvalidField
from twinkle_services.kit.ids import new_id
from twinkle_services.kit.rpc.server_info import software_version

MAX_LOGPROBS = 100_000
"""Maximum number of log-probabilities of all choices in a response that is not streamed; they take about 60 MB."""
_INLINE_LOGPROBS = 1_000
"""Responses with more log-probabilities are built in a worker thread."""


class ChoiceFormat(Protocol):
    """JSON form of the choices of completions or of chat completions."""

    object_name: str
    chunk_object_name: str
    id_prefix: str

    def choice(self, delta: ChoiceDelta) -> dict[str, Any]:
        """Return a complete choice."""
        ...

    def chunk(self, delta: ChoiceDelta) -> dict[str, Any] | None:
        """Return a part of a choice; None if it has no content."""
        ...

    def prompt_fields(self, deltas: Sequence[ChoiceDelta]) -> dict[str, Any]:
        """Return further fields of a document; `deltas` are its choices, or parts of its choices."""
        ...


class Writer(Protocol):
    """Builds the response to one request in the format of one API. Call only one method, and only once."""

    async def complete(self, deltas: AsyncIterator[ChoiceDelta]) -> dict[str, Any]:
        """Return the response after the last delta."""
        ...

    def chunks(self, deltas: AsyncIterator[ChoiceDelta]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the events of a streamed response."""
        ...


class ChatFormat:
    """Implements `ChoiceFormat` for chat completions."""

    object_name = 'chat.completion'
    chunk_object_name = 'chat.completion.chunk'
    id_prefix = 'chatcmpl'

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request

    def choice(self, delta: ChoiceDelta) -> dict[str, Any]:
        message: dict[str, Any] = {'role': 'assistant', 'content': delta.text, 'refusal': None}
        if delta.calls:
            message['content'] = delta.text or None
            message['tool_calls'] = [_called(call) for call in delta.calls]
        return {'index': delta.index, 'message': message, **self._shared_fields(delta)}

    def chunk(self, delta: ChoiceDelta) -> dict[str, Any] | None:
        content: dict[str, Any]
        if delta.prompt_token_ids is not None:
            content = {'role': 'assistant', 'content': ''}
        elif delta.calls:
            content = {'tool_calls': [{'index': call.index, **_called(call)} for call in delta.calls]}
            if delta.text:
                content['content'] = delta.text
        elif delta.text or delta.scored or (delta.token_ids and self._request.are_token_ids_returned):
            content = {'content': delta.text}
        elif delta.finish_reason:
            content = {}
        else:
            return None
        return {'index': delta.index, 'delta': content, **self._shared_fields(delta)}

    def prompt_fields(self, deltas: Sequence[ChoiceDelta]) -> dict[str, Any]:
        if not self._request.are_token_ids_returned or not deltas or deltas[0].prompt_token_ids is None:
            return {}
        return {'prompt_token_ids': list(deltas[0].prompt_token_ids)}

    def _shared_fields(self, delta: ChoiceDelta) -> dict[str, Any]:
        logprobs = None
        if self._request.top_logprobs is not None and delta.token_ids:
            logprobs = {'content': [_chat_token(score) for score in delta.scored], 'refusal': None}
        fields: dict[str, Any] = {'logprobs': logprobs, 'finish_reason': delta.finish_reason}
        if self._request.are_token_ids_returned:
            fields['token_ids'] = list(delta.token_ids)
        return fields


class CompletionFormat:
    """Implements `ChoiceFormat` for completions."""

    object_name = 'text_completion'
    chunk_object_name = 'text_completion'
    id_prefix = 'cmpl'

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request

    def choice(self, delta: ChoiceDelta) -> dict[str, Any]:
        choice: dict[str, Any] = {
            'index': delta.index,
            'text': delta.text,
            'logprobs': _completion_logprobs(delta.scored) if self._request.top_logprobs is not None else None,
            'finish_reason': delta.finish_reason,
        }
        if self._request.are_token_ids_returned:
            choice['token_ids'] = list(delta.token_ids)
            if delta.prompt_token_ids is not None:
                choice['prompt_token_ids'] = list(delta.prompt_token_ids)
        return choice

    def chunk(self, delta: ChoiceDelta) -> dict[str, Any] | None:
        is_shown = delta.text or delta.scored or delta.finish_reason or self._request.are_token_ids_returned
        return self.choice(delta) if is_shown else None

    def prompt_fields(self, deltas: Sequence[ChoiceDelta]) -> dict[str, Any]:
        del deltas
        return {}


class ResponseWriter:
    """Implements `Writer` for completions and chat completions."""

    def __init__(
        self,
        request: GenerationRequest,
        model: ResolvedModel,
        *,
        form: Callable[[GenerationRequest], ChoiceFormat],
        usage: TokenUsage,
        created: int,
    ) -> None:
        """Prepare a response; `usage` must be complete after the last delta, and `created` is in seconds since 1970."""
        self._request = request
        self._model = model
        self._form = form(request)
        self._usage = usage
        self._head = {
            'id': new_id(self._form.id_prefix),
            'created': created,
            'model': request.model,
            'system_fingerprint': f'twinkle-{software_version()}',
        }

    async def complete(self, deltas: AsyncIterator[ChoiceDelta]) -> dict[str, Any]:
        """Return the response after the last delta.

        Raises:
            InvalidField: there are too many log-probabilities to collect in memory.
        """
        joined = JoinedChoices()
        async for delta in deltas:
            joined.add(delta)
            if joined.logprob_count > MAX_LOGPROBS:
                raise InvalidField('logprobs', f'exceed {MAX_LOGPROBS} in one response; request fewer, or stream it')
        if joined.logprob_count > _INLINE_LOGPROBS:
            return await asyncio.to_thread(self._document, joined.choices())
        return self._document(joined.choices())

    def _document(self, choices: list[ChoiceDelta]) -> dict[str, Any]:
        return {
            **self._head,
            'object': self._form.object_name,
            'choices': [self._form.choice(choice) for choice in choices],
            'usage': self._usage_fields(),
            'twinkle': attribution(self._model, self._usage),
            **self._form.prompt_fields(choices),
        }

    async def chunks(self, deltas: AsyncIterator[ChoiceDelta]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the response in chunks; the chunk that completes the last choice reports the weights that were used."""
        head: dict[str, Any] = {**self._head, 'object': self._form.chunk_object_name}
        if self._request.is_usage_streamed:
            head['usage'] = None
        async for delta in deltas:
            choice = self._form.chunk(delta)
            if choice is None:
                continue
            chunk = {**head, 'choices': [choice], **self._form.prompt_fields([delta])}
            if delta.finish_reason and len(self._usage.spans) == self._request.choice_count:
                chunk['twinkle'] = attribution(self._model, self._usage)
            yield chunk
        if self._request.is_usage_streamed:
            yield {**head, 'choices': [], 'usage': self._usage_fields()}

    def _usage_fields(self) -> dict[str, Any]:
        usage = self._usage
        return {
            'prompt_tokens': usage.prompt_tokens,
            'completion_tokens': usage.completion_tokens,
            'total_tokens': usage.prompt_tokens + usage.completion_tokens,
            'prompt_tokens_details': {'cached_tokens': usage.cached_tokens},
        }


def weight_names(model: ResolvedModel) -> dict[str, Any]:
    """Return the names of the weights that a model name refers to."""
    adapter = model.adapter
    return {
        'base_model': shown_name(model.base_model),
        'adapter_id': adapter.adapter_id or None if adapter else None,
        'checkpoint_path': adapter.checkpoint_path or None if adapter else None,
    }


def attribution(model: ResolvedModel, usage: TokenUsage) -> dict[str, Any]:
    """Return the weights that produced each span of tokens."""
    spans = {
        index: [
            {'version': span.version, 'begin_token': span.begin_token, 'end_token': span.end_token} for span in spans
        ]
        for index, spans in sorted(usage.spans.items())
    }
    return {
        **weight_names(model),
        'choices': [{'index': index, 'version_spans': found} for index, found in spans.items()],
    }


def _called(call: CalledTool) -> dict[str, Any]:
    return {'id': call.call_id, 'type': 'function', 'function': {'name': call.name, 'arguments': call.arguments}}


def _chat_token(score: ScoredToken) -> dict[str, Any]:
    top = [{**_chat_text(token), 'logprob': logprob} for token, logprob in score.top]
    return {**_chat_text(score.token), 'logprob': score.logprob, 'top_logprobs': top}


def _chat_text(token: TokenText) -> dict[str, Any]:
    return {'token': token.text, 'bytes': list(token.piece)}


def _completion_logprobs(scored: Sequence[ScoredToken]) -> dict[str, Any]:
    return {
        'tokens': [_plain_text(score.token) for score in scored],
        'token_logprobs': [score.logprob for score in scored],
        'top_logprobs': [_top_by_text(score) for score in scored],
        'text_offset': [score.text_offset for score in scored],
    }


def _top_by_text(score: ScoredToken) -> dict[str, float] | None:
    if score.logprob is None:
        return None
    found: dict[str, float] = {}
    for token, logprob in sorted([*score.top, (score.token, score.logprob)], key=lambda entry: -entry[1]):
        # Among tokens with the same text, the most likely one is reported.
        found.setdefault(_plain_text(token), logprob)
    return found


def _plain_text(token: TokenText) -> str:
    """Return a token's text; if it is not UTF-8, the bytes are escaped as in OpenAI's API."""
    try:
        return token.piece.decode()
    except UnicodeDecodeError:
        return 'bytes:' + ''.join(f'\\x{byte:02x}' for byte in token.piece)
