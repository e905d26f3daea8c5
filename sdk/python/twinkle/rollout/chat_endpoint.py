"""A local HTTP endpoint for OpenAI's chat completions, at which the programs of environments ask for turns."""

import json
import socket
import threading
import time
import uuid
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedReader, RawIOBase
from typing import Any, cast

from twinkle.rollout.errors import InvalidTurnRequest, TurnInProgress
from twinkle.rollout.program_chat import ProgramChat, Turn, turn_request

_ROUTE = '/v1/chat/completions'
_SESSION_HEADER = 'X-Session-ID'
"""Header with which verifiers names the chat of a request. Other programs use an address per chat."""
_MAX_BODY_BYTES, _PIECE_BYTES = 64 << 20, 64 << 10
_MAX_DIGITS = 20
"""Maximum length of a number in a header; Python refuses to convert numbers with thousands of digits."""
_CONNECTIONS_PER_CHAT = 2
_REFUSED_CONNECTIONS = 16
"""Number of connections over the limit that receive an error response; further ones are closed immediately."""
_TIMEOUT = timedelta(minutes=1)
_REFUSED = {
    'message': 'the chat has no turn left: this is its maximum context length',
    'type': 'invalid_request_error',
    'code': 'context_length_exceeded',
}


class ChatEndpoint:
    """Serves all chats of a process's environments at one port of the loopback interface.

    The id of a chat is random, so other users of the machine cannot answer or read it.

    Each connection takes a thread. The number of connections is limited to `spare_connections` plus twice the largest
    number of chats that were open at the same time. A request over a further connection receives the status 503 with a
    time to retry. A connection is closed if no request begins within `timeout`, or if a request that has begun, or its
    response, is not transferred within `timeout`. An incomplete request receives the status 408.

    Concurrency: safe from any thread.
    """

    def __init__(self, *, spare_connections: int = 256, timeout: timedelta = _TIMEOUT) -> None:
        self._chats: dict[str, ProgramChat] = {}
        self._server = _Server(self._chats, spare_connections, timeout)
        self._thread = threading.Thread(target=self._server.serve_forever, name='chat-endpoint', daemon=True)
        self._thread.start()

    @property
    def base_url(self) -> str:
        """Address for requests that name their chat in a header."""
        return f'http://127.0.0.1:{self._server.server_port}/v1'

    def open_chat(self) -> ProgramChat:
        """Create a chat."""
        name = uuid.uuid4().hex
        chat = ProgramChat(f'http://127.0.0.1:{self._server.server_port}/{name}/v1')
        self._chats[name] = chat
        return chat

    def add_name(self, chat: ProgramChat, name: str) -> None:
        """Accept requests for a chat that have `name` in their header `X-Session-ID`."""
        self._chats[name] = chat

    def close_chat(self, chat: ProgramChat) -> None:
        """Refuse the requests of a chat, and forget its names."""
        chat.close()
        for name in [name for name, known in list(self._chats.items()) if known is chat]:
            self._chats.pop(name, None)

    def close_chats(self) -> None:
        """Refuse the requests of all chats."""
        for chat in list(self._chats.values()):
            self.close_chat(chat)

    def close(self) -> None:
        """Refuse the requests of all chats, and stop serving."""
        self.close_chats()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # The threads of connections that clients keep open end with the process.
    block_on_close = False

    def __init__(self, chats: dict[str, ProgramChat], spare_connections: int, timeout: timedelta) -> None:
        self.chats = chats
        self.transfer_seconds = timeout.total_seconds()
        self.refused: set[Any] = set()
        """Sockets of connections over the limit."""
        self._spare_connections = spare_connections
        self._most_chats = self._connection_count = 0
        self._lock = threading.Lock()
        super().__init__(('127.0.0.1', 0), _Handler)

    @property
    def connection_limit(self) -> int:
        """Maximum number of connections whose requests are answered."""
        return self._spare_connections + _CONNECTIONS_PER_CHAT * self._most_chats

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Count a connection, and return whether it gets a thread; the library closes a connection without one."""
        del client_address
        with self._lock:
            self._connection_count += 1
            self._most_chats = max(self._most_chats, len(self.chats))
            excess = self._connection_count - self.connection_limit
            if excess > 0:
                self.refused.add(request)
        return excess <= _REFUSED_CONNECTIONS

    def shutdown_request(self, request: Any) -> None:
        """Close a connection; the library calls this method once for each connection."""
        with self._lock:
            self._connection_count -= 1
            self.refused.discard(request)
        super().shutdown_request(request)


class _RequestTooSlow(Exception):
    """A request did not begin, or did not end, before its deadline."""


class _TimedReader(RawIOBase):
    """Reads from a socket until a deadline. The timeout of a socket limits only a single read."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self._connection = connection
        self._seconds = seconds
        self.has_read = False
        """Whether bytes have arrived; users of the reader may reset it."""
        self.restart()

    def restart(self) -> None:
        """Move the deadline."""
        self._deadline = time.monotonic() + self._seconds

    def readable(self) -> bool:
        """Return True, as buffered readers require."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Wait for bytes, and return their number; 0 at the end of the connection."""
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise _RequestTooSlow
        self._connection.settimeout(remaining)
        try:
            count = self._connection.recv_into(buffer)
        except TimeoutError as error:
            raise _RequestTooSlow from error
        finally:
            # `sendall` applies the timeout to the complete body of the response.
            self._connection.settimeout(self._seconds)
        self.has_read |= count > 0
        return count


class _Handler(BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'

    def setup(self) -> None:
        """Open the connection for reading and writing."""
        assert isinstance(self.server, _Server)  # noqa: S101 - the server of this handler
        super().setup()
        self.rfile.close()
        self._reader = _TimedReader(self.connection, self.server.transfer_seconds)
        self.rfile = BufferedReader(self._reader)
        # A response requires these fields, even if the first line of the request is incomplete.
        self.requestline, self.request_version = '', self.protocol_version

    def handle_one_request(self) -> None:
        """Wait for a request and answer it; the library closes the connection if a response is not read in time."""
        assert isinstance(self.server, _Server)  # noqa: S101 - the server of this handler
        self._reader.restart()
        self._reader.has_read = False
        try:
            super().handle_one_request()
        except _RequestTooSlow:
            self.close_connection = True
            if self._reader.has_read:
                problem = f'the request is incomplete after {self.server.transfer_seconds:g} s; send it again'
                self._send(408, {'error': {'message': problem, 'type': 'invalid_request_error'}})
        except ConnectionError:
            # The client has disconnected, for example at its own time limit.
            self.close_connection = True

    def parse_request(self) -> bool:
        """Read the headers of a request that has begun."""
        self._reader.restart()
        return super().parse_request()

    def do_POST(self) -> None:
        """Answer a request for a turn."""
        assert isinstance(self.server, _Server)  # noqa: S101 - the server of this handler
        if self.request in self.server.refused:
            problem = f'more than {self.server.connection_limit} connections are open; close unused ones, and retry'
            self._refuse(503, problem, 'server_error')
            self.close_connection = True
            return
        chat, length = self._chat(self.server), self._body_bytes()
        # Any user of the machine can connect, so only the bodies of open chats are kept, within a limit.
        if chat is None:
            self._refuse(404, f'{self.path} is not an open chat', 'not_found_error')
            return
        if length is None or length > _MAX_BODY_BYTES:
            given = self.headers['Content-Length']
            problem = f'the body must have a length of at most {_MAX_BODY_BYTES} bytes, got {given}'
            chat.finish(InvalidTurnRequest(problem))
            self._refuse(413, problem, 'invalid_request_error')
            return
        body = self.rfile.read(length)
        if len(body) < length:
            # The client disconnected, so the rest of the request is unknown; the program may send it again.
            self.close_connection = True
            return
        try:
            fields = _fields(body)
            turn = chat.ask(turn_request(fields))
        except TurnInProgress as error:
            self._send(409, {'error': {'message': str(error), 'type': 'invalid_request_error'}})
            return
        except InvalidTurnRequest as error:
            # The program may handle the response itself, so the environment must learn about the error too.
            chat.finish(error)
            self._send(400, {'error': {'message': str(error), 'type': 'invalid_request_error'}})
            return
        if turn is None:
            self._send(400, {'error': _REFUSED})
        elif fields.get('stream'):
            self._send_bytes(200, b''.join(_events(turn)), 'text/event-stream')
        else:
            self._send(200, {**_HEAD, 'object': 'chat.completion', 'choices': [_choice(turn, 'message')]})

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name of the overridden method
        """Log nothing, because the rollouts have the content."""

    def _chat(self, server: _Server) -> ProgramChat | None:
        name = self.headers.get(_SESSION_HEADER) if self.path == _ROUTE else self.path.removesuffix(_ROUTE)[1:]
        return server.chats.get(name or '') if self.path.endswith(_ROUTE) else None

    def _body_bytes(self) -> int | None:
        """Return the length of the body; None if it is malformed."""
        length = self.headers.get('Content-Length', '0')
        return int(length) if length.isdecimal() and len(length) <= _MAX_DIGITS else None

    def _refuse(self, status: int, problem: str, kind: str) -> None:
        """Skip the body and answer with an error; an answer before the end of the body could be lost."""
        length = self._body_bytes()
        self.close_connection = length is None
        remaining = length or 0
        while piece := self.rfile.read(min(remaining, _PIECE_BYTES)):
            remaining -= len(piece)
        self._send(status, {'error': {'message': problem, 'type': kind}})

    def _send(self, status: int, body: dict[str, Any]) -> None:
        self._send_bytes(status, json.dumps(body).encode(), 'application/json')

    def _send_bytes(self, status: int, body: bytes, content_type: str) -> None:
        self.send_response(status)
        self.send_header('Content-Type', content_type)
        self.send_header('Content-Length', str(len(body)))
        if status == 503:
            self.send_header('Retry-After', '1')
        if status in {408, 503}:
            self.send_header('Connection', 'close')
        self.end_headers()
        self.wfile.write(body)


def _fields(body: bytes) -> dict[str, Any]:
    try:
        fields: Any = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidTurnRequest(f'the body is not JSON: {error}') from error
    if not isinstance(fields, dict):
        raise InvalidTurnRequest(f'the body must be an object, got {type(fields).__name__}')
    return cast('dict[str, Any]', fields)


_HEAD = {'id': 'chatcmpl-rollout', 'created': 0, 'model': 'rollout'}


def _choice(turn: Turn, field: str) -> dict[str, Any]:
    message: dict[str, Any] = {'role': 'assistant', 'content': turn.content}
    if turn.tool_calls:
        message['tool_calls'] = [dict(call) for call in turn.tool_calls]
    reason = 'tool_calls' if turn.tool_calls else 'stop'
    return {'index': 0, field: message, 'finish_reason': reason, 'logprobs': None}


def _events(turn: Turn) -> list[bytes]:
    """Return the turn as a stream: one event with the complete turn, one with the reason for its end, and the end."""
    choice = _choice(turn, 'delta')
    for index, call in enumerate(choice['delta'].get('tool_calls', ())):
        call['index'] = index
    first: dict[str, Any] = {**choice, 'finish_reason': None}
    last: dict[str, Any] = {**choice, 'delta': {}}
    chunks = [{**_HEAD, 'object': 'chat.completion.chunk', 'choices': [item]} for item in (first, last)]
    return [b'data: %s\n\n' % text for text in (*(json.dumps(chunk).encode() for chunk in chunks), b'[DONE]')]
