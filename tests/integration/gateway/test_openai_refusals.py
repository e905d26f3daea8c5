"""Tests of refused requests of the OpenAI API: status, parameter name, and no running sequence afterwards."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from fixtures.fake_sampler_engine import FakeSamplerEngine
from fixtures.openai_gateway import FOREIGN_RUN, RUN, OpenAiGateway, facts_of, openai_gateway
from fixtures.running_gateway import ADMIN_KEY
from twinkle_services.gateway.config import FleetConfig

BODY_LIMIT = 1 << 16
HELLO: list[Any] = [{'role': 'user', 'content': 'Hi'}]


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[OpenAiGateway]:
    """A gateway that serves the OpenAI API with a small body limit."""
    async with openai_gateway(tmp_path, FakeSamplerEngine(), http_body_bytes=BODY_LIMIT) as gateway:
        yield gateway
        assert gateway.engine.load.running_sequences == 0


COMPLETION_CASES: list[tuple[dict[str, Any], str]] = [
    ({'model': 'tiny'}, 'prompt'),
    ({'prompt': 'a'}, 'model'),
    ({'model': 3, 'prompt': 'a'}, 'model'),
    ({'model': 'tiny', 'prompt': ''}, 'prompt'),
    ({'model': 'tiny', 'prompt': []}, 'prompt'),
    ({'model': 'tiny', 'prompt': {'a': 1}}, 'prompt'),
    ({'model': 'tiny', 'prompt': ['a', 3]}, 'prompt[1]'),
    ({'model': 'tiny', 'prompt': [1, 'a']}, 'prompt[1]'),
    ({'model': 'tiny', 'prompt': [1, True]}, 'prompt[1]'),
    ({'model': 'tiny', 'prompt': [[1], []]}, 'prompt[1]'),
    ({'model': 'tiny', 'prompt': [[-1]]}, 'prompt[0][0]'),
    ({'model': 'tiny', 'prompt': [100_000]}, 'prompt'),
    ({'model': 'tiny', 'prompt': ['a'] * 200, 'n': 2}, 'n'),
    ({'model': 'tiny', 'prompt': 'a', 'n': 0}, 'n'),
    ({'model': 'tiny', 'prompt': 'a', 'n': 1.0}, 'n'),
    ({'model': 'tiny', 'prompt': 'a', 'max_tokens': -1}, 'max_tokens'),
    ({'model': 'tiny', 'prompt': 'a', 'max_tokens': '5'}, 'max_tokens'),
    ({'model': 'tiny', 'prompt': 'a', 'max_tokens': 3, 'min_tokens': 4}, 'min_tokens'),
    ({'model': 'tiny', 'prompt': 'a', 'temperature': 2.5}, 'temperature'),
    ({'model': 'tiny', 'prompt': 'a', 'temperature': True}, 'temperature'),
    ({'model': 'tiny', 'prompt': 'a', 'temperature': 10**400}, 'temperature'),
    ({'model': 'tiny', 'prompt': 'a', 'presence_penalty': -(10**400)}, 'presence_penalty'),
    ({'model': 'tiny', 'prompt': 'a', 'top_p': 0}, 'top_p'),
    ({'model': 'tiny', 'prompt': 'a', 'min_p': 1.5}, 'min_p'),
    ({'model': 'tiny', 'prompt': 'a', 'seed': 2**63}, 'seed'),
    ({'model': 'tiny', 'prompt': 'a', 'stop': ['', 'b']}, 'stop[0]'),
    ({'model': 'tiny', 'prompt': 'a', 'stop': ['b'] * 65}, 'stop'),
    ({'model': 'tiny', 'prompt': 'a', 'stop_token_ids': [-1]}, 'stop_token_ids[0]'),
    ({'model': 'tiny', 'prompt': 'a', 'stream': 'yes'}, 'stream'),
    ({'model': 'tiny', 'prompt': 'a', 'stream_options': {'include_usage': True}}, 'stream_options'),
    ({'model': 'tiny', 'prompt': 'a', 'stream': True, 'stream_options': {'more': 1}}, 'stream_options.more'),
    ({'model': 'tiny', 'prompt': 'a', 'suffix': 'b'}, 'suffix'),
    ({'model': 'tiny', 'prompt': 'a', 'best_of': 2}, 'best_of'),
    ({'model': 'tiny', 'prompt': 'a', 'logprobs': 21}, 'logprobs'),
    ({'model': 'tiny', 'prompt': 'a', 'logit_bias': {'1': 2}}, 'logit_bias'),
    ({'model': 'tiny', 'prompt': 'a', 'metadata': {'a': 1}}, 'metadata.a'),
    ({'model': 'tiny', 'prompt': 'a', 'store': True}, 'store'),
    ({'model': 'tiny', 'prompt': 'a', 'unknown': 1}, 'unknown'),
    ({'model': 'tiny', 'prompt': 'a', 'response_format': {'type': 'xml'}}, 'response_format.type'),
    ({'model': 'tiny', 'prompt': 'a', 'response_format': {'type': 'json_schema'}}, 'response_format.json_schema'),
]

CHAT_CASES: list[tuple[dict[str, Any], str]] = [
    ({'messages': []}, 'messages'),
    ({'messages': 'Hi'}, 'messages'),
    ({'messages': ['Hi']}, 'messages[0]'),
    ({'messages': [{'role': 'robot', 'content': 'Hi'}]}, 'messages[0].role'),
    ({'messages': [{'role': 'user'}]}, 'messages[0].content'),
    ({'messages': [*HELLO, {'role': 'system', 'content': 'Hi'}]}, 'messages[1].role'),
    ({'messages': [{'role': 'user', 'content': [{'type': 'text'}]}]}, 'messages[0].content[0].text'),
    (
        {'messages': [{'role': 'user', 'content': [{'type': 'image_url', 'image_url': {'url': 'x'}}]}]},
        'messages[0].content[0].type',
    ),
    ({'messages': [{'role': 'user', 'content': 'Hi', 'name': 'Bob'}]}, 'messages[0].name'),
    ({'messages': HELLO, 'tools': [{'type': 'function'}]}, 'tools[0].function'),
    ({'messages': HELLO, 'top_logprobs': 2}, 'top_logprobs'),
    ({'messages': HELLO, 'logprobs': 2}, 'logprobs'),
    ({'messages': HELLO, 'max_tokens': 0}, 'max_tokens'),
    ({'messages': HELLO, 'max_tokens': 1, 'max_completion_tokens': 2}, 'max_tokens'),
    ({'messages': HELLO, 'chat_template_kwargs': {'other': 1}}, 'chat_template_kwargs.other'),
    ({'messages': HELLO, 'echo': True}, 'echo'),
]


async def test_invalid_parameters_are_named(running: OpenAiGateway) -> None:
    """The error for a wrong, unknown or ineffective parameter has status 400 and the parameter's name."""
    cases = [('/completions', body, param) for body, param in COMPLETION_CASES]
    cases += [('/chat/completions', {'model': 'tiny', **body}, param) for body, param in CHAT_CASES]
    mismatches: list[Any] = []
    for path, body, param in cases:
        response = await running.post(path, body)
        error = response.json()['error']
        if (response.status_code, error['param'], error['reason']) != (400, param, 'INVALID_FIELD'):
            mismatches.append((body, response.status_code, error))
    assert mismatches == []


async def test_schema_that_is_too_deep_is_refused(running: OpenAiGateway) -> None:
    """A schema nested deeper than a protobuf message allows is refused."""
    schema: dict[str, Any] = {'type': 'object'}
    for _ in range(13):
        schema = {'type': 'object', 'properties': {'a': schema}}
    response_format = {'type': 'json_schema', 'json_schema': {'name': 'deep', 'schema': schema}}
    response = await running.post('/completions', {'model': 'tiny', 'prompt': 'a', 'response_format': response_format})
    assert (response.status_code, response.json()['error']['param']) == (400, 'response_format.json_schema.schema')


async def test_exceeded_context_has_the_code_of_openai(running: OpenAiGateway) -> None:
    """A prompt that exceeds the context returns status 400 with OpenAI's code."""
    with pytest.raises(openai.BadRequestError) as raised:
        await running.client().completions.create(model='tiny', prompt='a' * 600)
    assert raised.value.code == 'context_length_exceeded'
    assert facts_of(raised.value)['metadata']['contextTokens'] == '512'


async def test_keys_and_scopes_have_different_statuses(running: OpenAiGateway) -> None:
    """A missing or wrong key returns status 401 and a missing scope 403; each error has the request id."""
    trainer = await running.gateway.make_key('alice', scopes=(1,))
    for key, status in (('tml-unknown-key', 401), (trainer.secret, 403)):
        with pytest.raises(openai.APIStatusError) as raised:
            await running.client(key).completions.create(model='tiny', prompt='a')
        assert raised.value.status_code == status
        assert raised.value.request_id == facts_of(raised.value)['request_id']
        assert raised.value.request_id
    response = await running.post('/completions', {}, headers={'authorization': ''})
    assert (response.status_code, response.json()['error']['reason']) == (401, 'CREDENTIALS_MISSING')


async def test_unknown_models_and_those_of_other_tenants_are_not_found(running: OpenAiGateway) -> None:
    """A missing model, another tenant's run and a malformed version are not found, with equal errors."""
    client = running.client()
    names = ('gpt-9', FOREIGN_RUN, f'{FOREIGN_RUN}@1', f'{RUN}@x', f'{RUN}@0', f'{RUN}@' + '9' * 30)
    names += ('twinkle://ad-2/weights/best', 'twinkle://ad-1', 'twinkle://ad-1/weights/', '@1', 'x' * 5000, 'ad-1@1@1')
    for name in names:
        with pytest.raises(openai.NotFoundError) as raised:
            await client.completions.create(model=name, prompt='a')
        assert (raised.value.code, raised.value.param) == ('model_not_found', 'model')
        message = facts_of(raised.value)['message']
        assert message.replace(name[:512], '') == "base model '' is not served here; available: tiny"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve(FOREIGN_RUN)


async def test_wrong_names_of_tinker_are_refused(running: OpenAiGateway) -> None:
    """The error for a malformed path, for weights saved for training, or for another base model states the cause."""
    path = f'tinker://{RUN}/sampler_weights/best'
    problems = {
        'tinker://': 'must be tinker://{run}/{kind}/{name}',
        f'tinker://{RUN}/sampler_weights/': 'must be a name of 1 to',
        f'tinker://{RUN}/nothing/best': 'must have one of the kinds',
        f'tinker://{RUN}/weights/best': 'save with save_weights_for_sampler',
        f'large;{path}': "the base model of the weights is 'tiny'",
        f';{path}': "the base model of the weights is 'tiny'",
    }
    for name, problem in problems.items():
        response = await running.post('/completions', {'model': name, 'prompt': 'a'})
        error = response.json()['error']
        assert (response.status_code, error['param'], error['reason']) == (400, 'model', 'INVALID_FIELD')
        assert problem in error['message']
    for name in (f'tinker://{FOREIGN_RUN}/sampler_weights/best', f'tiny;{FOREIGN_RUN}', 'tiny;', f'tiny;tiny;{path}'):
        with pytest.raises(openai.NotFoundError):
            await running.client().completions.create(model=name, prompt='a')


async def test_full_queue_returns_429_with_a_retry_time(tmp_path: Path) -> None:
    """A full queue returns status 429 with a retry time."""
    engine = FakeSamplerEngine(max_sequences=1)
    fleet = FleetConfig(waiting_per_tenant=1)
    async with openai_gateway(tmp_path, engine, queue_length=1, fleet=fleet) as running:
        await engine.pause()
        client = running.client()
        request: dict[str, Any] = {'model': 'tiny', 'prompt': 'a', 'max_tokens': 2}
        waiting = [asyncio.create_task(client.completions.create(**request)) for _ in range(2)]
        await running.sampler.wait_for_load(2)
        # One of these two requests waits for the sampler, and the queue has no space for the other one.
        waiting.append(asyncio.create_task(client.completions.create(**request)))
        waiting.append(asyncio.create_task(client.completions.create(**request, stream=True)))
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        failure = done.pop().exception()
        assert isinstance(failure, openai.RateLimitError)
        assert failure.response.headers['retry-after'] == '1'
        assert failure.code == 'rate_limit_exceeded'
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await engine.resume()


@pytest.mark.slow
async def test_unpublished_version_returns_503_with_a_retry_time(running: OpenAiGateway) -> None:
    """A version that is not published yet returns status 503 with a retry time."""
    with pytest.raises(openai.APIStatusError) as raised:
        await running.client().completions.create(model=f'{RUN}@3', prompt='a')
    assert raised.value.status_code == 503
    assert facts_of(raised.value)['reason'] == 'VERSION_NOT_READY'
    assert int(raised.value.response.headers['retry-after']) >= 1
    assert raised.value.response.headers['x-should-retry'] == 'true'


HOSTILE_BODIES: dict[str, bytes] = {
    'empty': b'',
    'incomplete JSON': b'{"model": ',
    'not an object': b'[1, 2]',
    'string': b'"model"',
    'deep': b'[' * 30_000,
    'deep in a field': b'{"model": ' + b'[' * 30_000 + b']' * 30_000 + b'}',
    'deep objects': b'{"a":' * 10_000 + b'1' + b'}' * 10_000,
    'NaN': b'{"model": "tiny", "prompt": "a", "temperature": NaN}',
    'infinity': b'{"model": "tiny", "prompt": "a", "temperature": 1e999}',
    'minus infinity': b'{"model": "tiny", "prompt": "a", "temperature": -Infinity}',
    'long number': b'{"model": "tiny", "prompt": "a", "seed": ' + b'9' * 10_000 + b'}',
    'repeated name': b'{"model": "tiny", "prompt": "a", "n": 1, "n": 2}',
    'invalid UTF-8': b'{"model": "tiny", "prompt": "\xff\xfe"}',
    'UTF-16': '{"model": "tiny"}'.encode('utf-16'),
    'byte order mark': b'\xef\xbb\xbf{"model": "tiny", "prompt": "a"}',
    'unpaired surrogate': b'{"model": "tiny", "prompt": "\\ud800"}',
    'unpaired surrogate as a name': b'{"model": "tiny", "\\udc00": "a"}',
}


async def test_hostile_bodies_are_refused(running: OpenAiGateway) -> None:
    """Ambiguous or malformed bodies return status 400, and the server still accepts valid requests."""
    responses = {name: await running.post('/completions', content=body) for name, body in HOSTILE_BODIES.items()}
    mismatches = {name: response.text for name, response in responses.items() if response.status_code != 400}
    assert mismatches == {}
    assert all(response.json()['error']['reason'] == 'INVALID_FIELD' for response in responses.values())
    response = await running.post('/completions', {'model': 'tiny', 'prompt': 'nul \0 and \U0001f642', 'max_tokens': 2})
    assert response.status_code == 200


async def test_bodies_that_are_too_large_return_413(running: OpenAiGateway) -> None:
    """Bodies over the limit return status 413; a chunked body is refused while it is sent."""
    for factor in (1, 2, 40):
        response = await running.post('/completions', content=b' ' * (factor * BODY_LIMIT + 1))
        assert (response.status_code, response.json()['error']['reason']) == (413, 'MESSAGE_TOO_LARGE')

    host, _, port = running.gateway.http_address.rpartition(':')
    reader, writer = await asyncio.open_connection(host, int(port))
    head = ('POST /v1/completions HTTP/1.1', 'host: x', f'authorization: Bearer {ADMIN_KEY}')
    writer.write('\r\n'.join((*head, 'transfer-encoding: chunked', '', '')).encode())
    for _ in range(2 * BODY_LIMIT // 4096 + 1):
        writer.write(b'1000\r\n' + b' ' * 4096 + b'\r\n')
        await writer.drain()
    response = await reader.read()
    assert response.startswith(b'HTTP/1.1 413')
    assert b'MESSAGE_TOO_LARGE' in response
    writer.close()
    await writer.wait_closed()


async def test_unsupported_body_types_are_refused(running: OpenAiGateway) -> None:
    """A form and a compressed body are refused, and the error names the header."""
    for header, value in (('content-type', 'application/x-www-form-urlencoded'), ('content-encoding', 'gzip')):
        response = await running.post('/completions', {'model': 'tiny', 'prompt': 'a'}, headers={header: value})
        assert (response.status_code, response.json()['error']['param']) == (400, header)


async def test_unknown_paths_and_methods_are_errors(running: OpenAiGateway) -> None:
    """An unknown path returns 404 with the code `unknown_url`, and an unsupported method returns 405."""
    missing = await running.post('/moderations', {})
    assert (missing.status_code, missing.json()['error']['code']) == (404, 'unknown_url')
    assert (await running.post('/models', {})).status_code == 405


async def test_labels_and_nulls_change_nothing(running: OpenAiGateway) -> None:
    """Labels are accepted but have no effect, and null parameters count as absent."""
    request: dict[str, Any] = {'model': 'tiny', 'prompt': 'a', 'max_tokens': 3, 'seed': 1}
    labelled = {**request, 'user': 'u', 'metadata': {'a': 'b'}, 'stop': None, 'n': None, 'store': False, 'best_of': 1}
    plain, other = await running.post('/completions', request), await running.post('/completions', labelled)
    assert plain.json()['choices'] == other.json()['choices']
    assert other.status_code == 200
    assert ADMIN_KEY not in other.text
