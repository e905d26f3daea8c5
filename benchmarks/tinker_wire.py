"""A client of the Tinker API that does nothing but speak its wire: cheap enough that hundreds fit beside the server.

It speaks through aiohttp: with some hundred requests under way httpx's pool takes seconds of each, which would be
measured instead of the server.
"""

import json
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import aiohttp

RETRIED = (408, 429, 500, 502, 503, 504)
"""What the SDK sends again after a while."""


class RequestFailed(Exception):
    """The server refused for good, or a future failed; the text is its own."""


@dataclass
class TinkerWire:
    """Speaks for one key. Counts what it was told to send again."""

    http: aiohttp.ClientSession
    headers: dict[str, str]
    retry_count: int = 0

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer; what the SDK would send again is sent again.

        Raises:
            RequestFailed: it was refused for good.
        """
        while True:
            async with self.http.post(f'/api/v1/{path}', json=body, headers=self.headers) as answer:
                if answer.status == HTTPStatus.OK:
                    return await answer.json()
                if answer.status not in RETRIED:
                    raise RequestFailed(f'{path}: {answer.status} {(await answer.text())[:300]}')
            self.retry_count += 1

    async def outcome(self, accepted: dict[str, Any]) -> dict[str, Any]:
        """Return what came of a future.

        Raises:
            RequestFailed: it failed.
        """
        while True:
            answer = await self.post('retrieve_future', {'request_id': accepted['request_id']})
            if answer.get('type') != 'try_again':
                break
        if 'error' in answer:
            raise RequestFailed(json.dumps(answer)[:300])
        return answer

    async def base_model(self) -> str:
        """Return the name of the first base model that is there."""
        async with self.http.get('/api/v1/get_server_capabilities', headers=self.headers) as answer:
            return (await answer.json())['supported_models'][0]['model_name']

    async def begin_session(self) -> str:
        """Return a new session's id."""
        return (await self.post('create_session', {'sdk_version': '0.38.0', 'tags': []}))['session_id']

    async def create_model(self, session_id: str, *, number: int, base_model: str, rank: int) -> str:
        """Return a new model's id."""
        config = {'rank': rank, 'train_unembed': False}
        body = {'session_id': session_id, 'model_seq_id': number, 'base_model': base_model, 'lora_config': config}
        return (await self.outcome(await self.post('create_model', body)))['model_id']


def chunk_of(tokens: list[int]) -> dict[str, Any]:
    """Return a prompt of the wire."""
    return {'chunks': [{'type': 'encoded_text', 'tokens': tokens}]}


def batch_of(tokens: list[int]) -> dict[str, Any]:
    """Return a batch of one example, trained by cross-entropy on every next token."""
    inputs = {
        'target_tokens': {'data': tokens[1:], 'dtype': 'int64', 'shape': [len(tokens) - 1]},
        'weights': {'data': [1.0] * (len(tokens) - 1), 'dtype': 'float32', 'shape': [len(tokens) - 1]},
    }
    example = {'model_input': chunk_of(tokens[:-1]), 'loss_fn_inputs': inputs}
    return {'data': [example], 'loss_fn': 'cross_entropy'}
