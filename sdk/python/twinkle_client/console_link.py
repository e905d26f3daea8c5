"""One-time links, with which a browser logs in to the console of a gateway."""

import http.client
import json
import ssl
from typing import Any, cast

from twinkle_client.endpoint import Endpoint
from twinkle_client.rpc.address import Address
from twinkle_client.rpc.trust import read_authorities

_TIMEOUT_SECONDS = 10.0
_RESPONSE_LIMIT_BYTES = 1 << 14


class ConsoleUnavailable(Exception):
    """The server created no link; the message states the reason and the remedy."""


def create_console_link(endpoint: Endpoint) -> str:
    """Return a URL that logs a browser in to the console once, within ten minutes, with the key of `endpoint`.

    Args:
        endpoint: HTTP address of a gateway, and an API key.

    Raises:
        ConsoleUnavailable: The server does not respond, has no console, or refuses the key.
        ValueError: The address is malformed, or the file with the CA certificates cannot be used.
    """
    address = Address.parse(endpoint.address)
    try:
        status, content = _post(address, endpoint)
    except (OSError, http.client.HTTPException) as error:
        remedy = 'give the HTTP address of the gateway, its http_listen, with --http URL'
        raise ConsoleUnavailable(f'no console responds at {endpoint.address} ({error}); {remedy}') from error
    if status == http.client.UNAUTHORIZED:
        raise ConsoleUnavailable(f'the API key is not valid at {endpoint.address}; set TWINKLE_API_KEY')
    if status in {http.client.NOT_FOUND, http.client.METHOD_NOT_ALLOWED}:
        raise ConsoleUnavailable(f'{endpoint.address} serves no console; set `console: true` in the gateway')
    link = _link_in(content)
    if status != http.client.OK or not link:
        raise ConsoleUnavailable(f'{endpoint.address} created no link; it responded with the status {status}')
    scheme = 'https' if address.is_secure else 'http'
    return f'{scheme}://{address.target}/console/#/login/{link}'


def _post(address: Address, endpoint: Endpoint) -> tuple[int, bytes]:
    connection = _connection(address, endpoint.ca)
    headers = {'authorization': f'Bearer {endpoint.api_key}', 'content-type': 'application/json'}
    try:
        connection.request('POST', '/console/api/links', b'', headers)
        response = connection.getresponse()
        return response.status, response.read(_RESPONSE_LIMIT_BYTES)
    finally:
        connection.close()


def _connection(address: Address, ca: str) -> http.client.HTTPConnection:
    if not address.is_secure:
        return http.client.HTTPConnection(address.host, address.port, timeout=_TIMEOUT_SECONDS)
    authorities = read_authorities(ca)
    context = ssl.create_default_context(cadata=authorities.decode('ascii', 'ignore') if authorities else None)
    return http.client.HTTPSConnection(address.host, address.port, timeout=_TIMEOUT_SECONDS, context=context)


def _link_in(content: bytes) -> str:
    try:
        body: Any = json.loads(content)
    except ValueError:
        return ''
    link: Any = cast(dict[str, Any], body).get('link') if isinstance(body, dict) else None
    return link if isinstance(link, str) else ''
