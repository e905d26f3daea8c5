"""Responses with the archive of a checkpoint."""

from typing import Any

from twinkle_services.gateway.http.archives import ByteRange, FileResponse
from twinkle_services.gateway.http.call import HttpCall, Route
from twinkle_services.gateway.tinker.routes import TinkerErrors


class UnreadCheckpoints:
    """Checkpoints whose archives must not be read."""

    def archive(self, path: str, *, offset: int) -> Any:
        raise AssertionError((path, offset))


async def test_head_does_not_read_the_archive() -> None:
    """The response to a HEAD request has the length of the file or of the range; the archive is not read."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def unused(*args: Any) -> Any:
        raise AssertionError(args)

    checkpoints: Any = UnreadCheckpoints()
    response = FileResponse(checkpoints, 'twinkle://ad-1/weights/best', ByteRange(0, 1 << 40), 'best.tar', 'sha')
    route = Route(path='/', http_method='GET', name='x', method='/x', serve=unused, errors=TinkerErrors())
    for headers, status, size in (({}, 200, b'1099511627776'), ({'range': 'bytes=1-5'}, 206, b'5')):
        sent.clear()
        await response.write(HttpCall(route, {'method': 'HEAD'}, unused, send, headers))
        assert sent[0]['status'] == status
        assert dict(sent[0]['headers'])[b'content-length'] == size
        assert dict(sent[0]['headers'])[b'cache-control'] == b'private'
        assert [(message['body'], message['more_body']) for message in sent[1:]] == [(b'', False)]
