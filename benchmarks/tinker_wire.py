"""A minimal client of the Tinker API, with so little overhead that hundreds of clients can run on the server's machine.

It uses aiohttp, because the connection pool of httpx adds seconds to each request if several hundred are in progress.
"""

import json
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import aiohttp

RETRYABLE_STATUSES = (408, 429, 500, 502, 503, 504)
"""Statuses after which this client repeats a request; the SDK also repeats 409 and all other 5xx."""


class RequestFailed(Exception):
    """The server refused a request permanently, or a future failed. The message contains the server's response."""


@dataclass
class TinkerWire:
    """Sends requests with one API key, and counts repeated requests."""

    http: aiohttp.ClientSession
    headers: dict[str, str]
    retry_count: int = 0

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the response, repeating the request after a status in `RETRYABLE_STATUSES`.

        Raises:
            RequestFailed: The request was refused permanently.
        """
        while True:
            async with self.http.post(f'/api/v1/{path}', json=body, headers=self.headers) as response:
                if response.status == HTTPStatus.OK:
                    return await response.json()
                if response.status not in RETRYABLE_STATUSES:
                    raise RequestFailed(f'{path}: {response.status} {(await response.text())[:300]}')
            self.retry_count += 1

    async def result(self, accepted: dict[str, Any]) -> dict[str, Any]:
        """Return the result of a future.

        Raises:
            RequestFailed: The future failed.
        """
        while True:
            response = await self.post('retrieve_future', {'request_id': accepted['request_id']})
            if response.get('type') != 'try_again':
                break
        if 'error' in response:
            raise RequestFailed(json.dumps(response)[:300])
        return response

    async def base_model(self) -> str:
        """Return the name of the first base model of the server."""
        async with self.http.get('/api/v1/get_server_capabilities', headers=self.headers) as response:
            return (await response.json())['supported_models'][0]['model_name']

    async def begin_session(self) -> str:
        """Create a session and return its id."""
        return (await self.post('create_session', {'sdk_version': '0.38.0', 'tags': []}))['session_id']

    async def create_model(self, session_id: str, *, number: int, base_model: str, rank: int) -> str:
        """Create a model and return its id."""
        config = {'rank': rank, 'train_unembed': False}
        body = {'session_id': session_id, 'model_seq_id': number, 'base_model': base_model, 'lora_config': config}
        return (await self.result(await self.post('create_model', body)))['model_id']


def chunk_of(tokens: list[int]) -> dict[str, Any]:
    """Return a prompt in the format of the API."""
    return {'chunks': [{'type': 'encoded_text', 'tokens': tokens}]}


def batch_of(tokens: list[int]) -> dict[str, Any]:
    """Return a batch of one example with a cross-entropy loss on every token but the first."""
    inputs = {
        'target_tokens': {'data': tokens[1:], 'dtype': 'int64', 'shape': [len(tokens) - 1]},
        'weights': {'data': [1.0] * (len(tokens) - 1), 'dtype': 'float32', 'shape': [len(tokens) - 1]},
    }
    example = {'model_input': chunk_of(tokens[:-1]), 'loss_fn_inputs': inputs}
    return {'data': [example], 'loss_fn': 'cross_entropy'}
