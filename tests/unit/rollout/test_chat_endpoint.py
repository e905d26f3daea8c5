"""Requests to the endpoint for programs that end early or have a malformed head."""

import json
import socket
from collections.abc import Iterator
from datetime import timedelta
from urllib.parse import urlsplit

import pytest

from twinkle.rollout.chat_endpoint import ChatEndpoint
from twinkle.rollout.program_chat import ProgramChat, Turn, TurnRequest

BODY = json.dumps({'messages': [{'role': 'user', 'content': 'hi'}]}).encode()
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
        assert isinstance(chat.next_event(timedelta(seconds=60)), TurnRequest)
        chat.reply(Turn(content='a'))
        assert b' 200 ' in second.recv(100)


def test_length_with_thousands_of_digits_is_refused(endpoint: ChatEndpoint) -> None:
    """A length that Python cannot convert to a number is answered."""
    with connected(endpoint.open_chat(), '9' * 5000) as connection:
        assert b' 413 ' in connection.recv(100)
