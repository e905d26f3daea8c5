"""Requests to the endpoint for programs that end early, arrive slowly, are repeated or have a malformed head."""

import json
import select
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from http.client import HTTPConnection, HTTPResponse
from typing import Any
from urllib.parse import urlsplit

import pytest
from openai import APITimeoutError, OpenAI

from twinkle.rollout import InvalidTurnRequest
from twinkle.rollout.chat_endpoint import ChatEndpoint
from twinkle.rollout.program_chat import ProgramChat, Turn, TurnRequest

HI: Any = [{'role': 'user', 'content': 'hi'}]
BODY = json.dumps({'messages': HI}).encode()
SOON = timedelta(seconds=60)
pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def endpoint() -> Iterator[ChatEndpoint]:
    """Return an endpoint, and close it after the test."""
    endpoint = ChatEndpoint()
    yield endpoint
    endpoint.close()


def connected(chat: ProgramChat, length: str) -> socket.socket:
    """Return a connection over which the head of a request for a turn was sent."""
    address = urlsplit(chat.base_url)
    connection = socket.create_connection((address.hostname, address.port))
    connection.sendall(f'POST {address.path}/chat/completions HTTP/1.1\r\nContent-Length: {length}\r\n\r\n'.encode())
    return connection


def test_incomplete_request_does_not_end_its_chat(endpoint: ChatEndpoint) -> None:
    """A client that disconnects within the body of a request may send the request again over another connection."""
    chat, length = endpoint.open_chat(), str(len(BODY))
    with connected(chat, length) as first, connected(chat, length) as second:
        first.sendall(BODY[:-1])
        first.shutdown(socket.SHUT_WR)
        assert first.recv(1) == b''
        second.sendall(BODY)
        assert isinstance(chat.next_event(SOON), TurnRequest)
        chat.reply(Turn(content='a'))
        assert b' 200 ' in second.recv(100)


def test_length_with_thousands_of_digits_is_refused(endpoint: ChatEndpoint) -> None:
    """A length that Python cannot convert to a number is answered."""
    with connected(endpoint.open_chat(), '9' * 5000) as connection:
        assert b' 413 ' in connection.recv(100)


@pytest.mark.parametrize(
    'begin',
    [
        'POST /v1/chat/comple',
        'POST /v1/chat/completions HTTP/1.1\r\nHost',
        'POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 1000\r\n\r\n',
        'POST PATH HTTP/1.1\r\nContent-Length: 1000\r\n\r\n{',
    ],
)
def test_request_that_arrives_slowly_is_answered_and_closed(begin: str) -> None:
    """A request gets the status 408 at its deadline, although its client sends a byte of it from time to time."""
    endpoint = ChatEndpoint(timeout=timedelta(seconds=0.5))
    chat = endpoint.open_chat()
    address = urlsplit(chat.base_url)
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(begin.replace('PATH', f'{address.path}/chat/completions').encode())
        with suppress(ConnectionError):
            for _ in range(200):
                if select.select([connection], [], [], 0.05)[0]:
                    break
                connection.sendall(b'a')
            else:
                pytest.fail('the connection is still open')
        response = HTTPResponse(connection)
        response.begin()
        error = json.loads(response.read())['error']
        assert (response.status, response.headers['Connection']) == (408, 'close')
        assert 'incomplete after 0.5 s; send it again' in error['message']
        # A byte that was sent at the same time resets the connection.
        with suppress(ConnectionError):
            assert connection.recv(1) == b''
    # The chat continues.
    with connected(chat, str(len(BODY))) as second:
        second.sendall(BODY)
        assert isinstance(chat.next_event(SOON), TurnRequest)
    endpoint.close()


@pytest.mark.parametrize('count', [0, 1])
def test_connection_without_a_request_is_closed_silently(count: int) -> None:
    """A connection over which no request begins, or none after another one, is closed without a response."""
    endpoint = ChatEndpoint(timeout=timedelta(seconds=0.5))
    address = urlsplit(endpoint.base_url)
    client = HTTPConnection('127.0.0.1', address.port or 0, timeout=60)
    client.connect()
    for _ in range(count):
        client.request('POST', '/unknown/v1/chat/completions', b'{}')
        response = client.getresponse()
        assert (response.status, response.read()[:1]) == (404, b'{')
    assert client.sock.recv(1) == b''
    client.close()
    endpoint.close()


def posted(chat: ProgramChat, body: Any) -> tuple[int, Any]:
    """Send a request for a turn over a new connection, and return the status and the response."""
    address = urlsplit(chat.base_url)
    client = HTTPConnection(address.hostname or '', address.port or 0, timeout=60)
    try:
        client.request('POST', f'{address.path}/chat/completions', json.dumps(body))
        response = client.getresponse()
        return response.status, json.loads(response.read())
    finally:
        client.close()


def content(answer: tuple[int, Any]) -> str:
    """Return the text of a successful response."""
    status, body = answer
    assert status == 200, body
    return body['choices'][0]['message']['content']


def test_repeated_request_waits_for_the_same_turn(endpoint: ChatEndpoint) -> None:
    """A request that is sent again during the call of the model gets the same turn, and the environment sees one."""
    chat = endpoint.open_chat()
    with ThreadPoolExecutor() as threads:
        waiting = [threads.submit(posted, chat, {'messages': HI})]
        assert isinstance(chat.next_event(SOON), TurnRequest)
        with connected(chat, str(len(BODY))) as lost:
            lost.sendall(BODY)
        waiting += [threads.submit(posted, chat, {'temperature': 1, 'messages': HI}) for _ in range(2)]
        with pytest.raises(TimeoutError):
            chat.next_event(timedelta(seconds=0.2))
        chat.reply(Turn(content='a'))
        assert [content(answer.result()) for answer in waiting] == ['a'] * 3
        # The response may have been lost, so a later repetition gets the turn too.
        assert content(posted(chat, {'messages': HI})) == 'a'
        grown = [*HI, {'role': 'assistant', 'content': 'a'}, {'role': 'user', 'content': 'more'}]
        last = threads.submit(posted, chat, {'messages': grown})
        event = chat.next_event(SOON)
        assert isinstance(event, TurnRequest)
        assert len(event.messages) == 3
        chat.reply(Turn(content='b'))
        assert content(last.result()) == 'b'


def test_different_request_during_a_call_is_refused(endpoint: ChatEndpoint) -> None:
    """A different request during the call of the model gets the status 409, and the chat continues."""
    chat = endpoint.open_chat()
    other = [{'role': 'user', 'content': 'other'}]
    with ThreadPoolExecutor() as threads:
        first: Future[Any] = threads.submit(posted, chat, {'messages': HI})
        chat.next_event(SOON)
        for body in ({'messages': other}, {'messages': HI, 'tools': [{'type': 'function', 'function': {'name': 'f'}}]}):
            status, answer = posted(chat, body)
            assert (status, 'one turn at a time' in answer['error']['message']) == (409, True)
        chat.reply(Turn(content='a'))
        assert content(first.result()) == 'a'
        second = threads.submit(posted, chat, {'messages': other})
        chat.next_event(SOON)
        chat.reply(Turn(content='b'))
        assert content(second.result()) == 'b'


def test_client_with_retries_gets_its_turn_after_a_timeout(endpoint: ChatEndpoint) -> None:
    """OpenAI's SDK repeats a request after its own time limit, and receives the turn of the first attempt."""
    chat = endpoint.open_chat()
    hasty = OpenAI(base_url=chat.base_url, api_key='none', max_retries=0, timeout=0.3)
    with hasty, pytest.raises(APITimeoutError):
        hasty.chat.completions.create(model='any', messages=HI)
    assert isinstance(chat.next_event(SOON), TurnRequest)
    with ThreadPoolExecutor() as threads, OpenAI(base_url=chat.base_url, api_key='none', timeout=60) as client:
        answer = threads.submit(client.chat.completions.create, model='any', messages=HI)
        with pytest.raises(TimeoutError):
            chat.next_event(timedelta(seconds=0.2))
        chat.reply(Turn(content='a'))
        assert answer.result().choices[0].message.content == 'a'


def test_endless_repetition_of_a_request_ends_its_chat(endpoint: ChatEndpoint) -> None:
    """A program that repeats a request again and again after its turn is refused, and the environment learns it."""
    chat = endpoint.open_chat()
    with ThreadPoolExecutor() as threads:
        first = threads.submit(posted, chat, {'messages': HI})
        chat.next_event(SOON)
        chat.reply(Turn(content='a'))
        assert content(first.result()) == 'a'
    answers = [posted(chat, {'messages': HI}) for _ in range(17)]
    assert [status for status, _ in answers] == [200] * 16 + [400]
    with pytest.raises(InvalidTurnRequest, match='add messages'):
        chat.next_event(SOON)


def test_repetition_of_a_refused_request_is_refused(endpoint: ChatEndpoint) -> None:
    """A request that the model has no turn for is refused again, without another event for the environment."""
    chat = endpoint.open_chat()
    with ThreadPoolExecutor() as threads:
        first = threads.submit(posted, chat, {'messages': HI})
        chat.next_event(SOON)
        chat.reply(None)
        statuses = [first.result()[0], posted(chat, {'messages': HI})[0]]
    assert statuses == [400, 400]
    with pytest.raises(TimeoutError):
        chat.next_event(timedelta(seconds=0.1))
