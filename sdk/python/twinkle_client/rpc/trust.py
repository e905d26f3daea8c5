"""Which certificates of servers are believed, and why a connection cannot come about that should."""

import asyncio
import ssl
from pathlib import Path

from twinkle_client.rpc.address import Address

_PROBE_SECONDS = 2.0
_NOT_TLS = {'WRONG_VERSION_NUMBER', 'RECORD_LAYER_FAILURE', 'HTTP_REQUEST', 'UNEXPECTED_MESSAGE'}
"""What OpenSSL calls an answer that is no TLS."""
_EXPIRED, _NOT_YET = 10, 9
_OTHER_NAME = {62, 64}
"""OpenSSL's codes of certificates for another host or address."""


def read_authorities(ca: str) -> bytes | None:
    """Return the certificates of authorities that servers are checked against.

    Args:
        ca: PEM file. Empty: this machine's authorities, or those of SSL_CERT_FILE, as other programs take them.

    Returns:
        PEM; None where the machine has no such file, which leaves those that come with grpc.

    Raises:
        ValueError: the file cannot be read, or holds none.
    """
    path = ca or ssl.get_default_verify_paths().cafile
    if not path:
        return None
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f'ca: cannot read {path} ({error.strerror}); give a PEM file of certificates') from None
    if b'-----BEGIN CERTIFICATE-----' not in content:
        raise ValueError(f'ca: {path} holds no certificate in PEM form')
    return content


async def explain_no_connection(address: Address, authorities: bytes | None) -> str:
    """Return what is wrong with how a server is called that listens; empty where it may be just away.

    Args:
        address: of the server.
        authorities: as of `read_authorities`.
    """
    try:
        async with asyncio.timeout(_PROBE_SECONDS):
            return await _probe(address, authorities)
    except (OSError, TimeoutError):
        return ''


async def _probe(address: Address, authorities: bytes | None) -> str:
    context = ssl.create_default_context(cadata=authorities.decode('ascii', 'ignore') if authorities else None)
    context.set_alpn_protocols(['h2'])
    if not address.is_secure:
        # Only asked whether it speaks TLS at all; nothing is sent.
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        _, writer = await asyncio.open_connection(address.host, address.port, ssl=context)
    except ssl.SSLCertVerificationError as error:
        return f'{address}: {_objection(error, address.host)}'
    except ssl.SSLError as error:
        if address.is_secure and error.reason in _NOT_TLS:
            return f'the server at {address.target} does not speak TLS; write http://{address.target}'
        return ''
    writer.close()
    return '' if address.is_secure else f'the server at {address.target} speaks TLS; write https://{address.target}'


def _objection(error: ssl.SSLCertVerificationError, host: str) -> str:
    if error.verify_code == _EXPIRED:
        return 'its certificate has expired; whoever runs it has to renew it'
    if error.verify_code == _NOT_YET:
        return "its certificate is not valid yet; one of the two machines' clocks is wrong"
    if error.verify_code in _OTHER_NAME:
        return f'its certificate is not for {host}; call it by a name that the certificate is for'
    cure = 'give the PEM file of that authority as ca= or in TWINKLE_CA'
    return f'its certificate is signed by no authority that is trusted here; {cure}'
