"""A whole answer, or a stream of chunks, out of pieces."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from services.gateway.openai.asked import Asked
from services.gateway.openai.model_names import Weights
from services.gateway.openai.pieces import JoinedPieces, Piece, Tally
from services.gateway.openai.shapes import Shape
from services.kit.errors import InvalidField
from services.kit.ids import new_id
from services.kit.rpc.server_info import software_version

MAX_LOGPROBS = 100_000
"""Log-probabilities in an answer that is no stream, over all its choices: some 60 MB until it is written."""
_LOGPROBS_AT_ONCE = 1_000
"""More than these are written down beside the event loop."""


class AnswerWriter:
    """Writes the answer to one request."""

    def __init__(self, asked: Asked, weights: Weights, *, shape: Shape, tally: Tally, created: int) -> None:
        """Write choices as `shape` shows them, and what `tally` adds up to once they are all there.

        Args:
            asked: the request.
            weights: what its model means.
            shape: of a choice.
            tally: filled by whoever reads the pieces.
            created: when it was asked, in seconds since 1970.
        """
        self._asked = asked
        self._weights = weights
        self._shape = shape
        self._tally = tally
        self._head = {
            'id': new_id(shape.id_prefix),
            'created': created,
            'model': asked.model,
            'system_fingerprint': f'twinkle-{software_version()}',
        }

    async def whole(self, pieces: AsyncIterator[Piece]) -> dict[str, Any]:
        """Return the answer once it is complete.

        Raises:
            InvalidField: it would have more log-probabilities than are held in memory.
        """
        joined = JoinedPieces()
        async for piece in pieces:
            joined.add(piece)
            if joined.logprob_count > MAX_LOGPROBS:
                raise InvalidField('logprobs', f'of a whole answer are at most {MAX_LOGPROBS}; ask for a stream')
        if joined.logprob_count > _LOGPROBS_AT_ONCE:
            return await asyncio.to_thread(self._whole, joined.choices())
        return self._whole(joined.choices())

    def _whole(self, choices: list[Piece]) -> dict[str, Any]:
        return {
            **self._head,
            'object': self._shape.object_name,
            'choices': [self._shape.choice(choice) for choice in choices],
            'usage': self._usage(),
            'twinkle': self._attribution(),
            **self._shape.prompt_fields(choices),
        }

    async def chunks(self, pieces: AsyncIterator[Piece]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the answer as it comes; the chunk that ends the last choice tells the versions."""
        head: dict[str, Any] = {**self._head, 'object': self._shape.chunk_object_name}
        if self._asked.is_usage_streamed:
            head['usage'] = None
        async for piece in pieces:
            choice = self._shape.chunk(piece)
            if choice is None:
                continue
            chunk = {**head, 'choices': [choice], **self._shape.prompt_fields([piece])}
            if piece.finish_reason and len(self._tally.spans) == self._asked.choice_count:
                chunk['twinkle'] = self._attribution()
            yield chunk
        if self._asked.is_usage_streamed:
            yield {**head, 'choices': [], 'usage': self._usage()}

    def _usage(self) -> dict[str, Any]:
        tally = self._tally
        return {
            'prompt_tokens': tally.prompt_tokens,
            'completion_tokens': tally.completion_tokens,
            'total_tokens': tally.prompt_tokens + tally.completion_tokens,
            'prompt_tokens_details': {'cached_tokens': tally.cached_tokens},
        }

    def _attribution(self) -> dict[str, Any]:
        """Return which weights drew which tokens."""
        adapter = self._weights.adapter
        spans = {
            index: [
                {'version': span.version, 'begin_token': span.begin_token, 'end_token': span.end_token}
                for span in spans
            ]
            for index, spans in sorted(self._tally.spans.items())
        }
        return {
            'base_model': self._weights.base_model,
            'adapter_id': adapter.adapter_id or None if adapter else None,
            'checkpoint_path': adapter.checkpoint_path or None if adapter else None,
            'choices': [{'index': index, 'version_spans': found} for index, found in spans.items()],
        }
