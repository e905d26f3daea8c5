"""CA certificates of the TLS connection, and the diagnosis of connections that fail."""

import asyncio
import ssl
from pathlib import Path

from twinkle_client.rpc.address import Address

_PROBE_SECONDS = 2.0
"""Time limit for the diagnosis of a connection."""
_NOT_TLS = {'WRONG_VERSION_NUMBER', 'RECORD_LAYER_FAILURE', 'HTTP_REQUEST', 'UNEXPECTED_MESSAGE'}
"""OpenSSL's reasons for a response that is not TLS."""
_EXPIRED, _NOT_YET_VALID = 10, 9
"""OpenSSL's verify codes for a certificate outside its validity period."""
_NAME_MISMATCH = {62, 64}
"""OpenSSL's verify codes for a certificate of a different host or address."""


def read_authorities(ca: str) -> bytes | None:
    """Return the CA certificates that servers are verified against.

    Args:
        ca: Path of a PEM file. Empty: the certificates in the file that SSL_CERT_FILE names, or the system's.

    Returns:
        The PEM bytes; None if the system has no such file, in which case grpc uses its bundled certificates.

    Raises:
        ValueError: The file cannot be read or contains no certificate.
    """
    path = ca or ssl.get_default_verify_paths().cafile
    if not path:
        return None
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f'ca: cannot read {path} ({error.strerror}); give a PEM file of certificates') from None
    if b'-----BEGIN CERTIFICATE-----' not in content:
        raise ValueError(f'ca: {path} contains no PEM certificate; give a PEM file of CA certificates')
    return content


async def diagnose_connection(address: Address, authorities: bytes | None) -> str:
    """Determine the cause of a failed connection to a server that accepts TCP connections.

    The diagnosis finds a wrong scheme, and a certificate that is not trusted, not valid now or for another host.

    Args:
        address: Address of the server.
        authorities: Result of `read_authorities`.

    Returns:
        A message for the user; empty for any other cause, for example if the server is down.
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
        # This only tests whether the server uses TLS; no data is sent.
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        _, writer = await asyncio.open_connection(address.host, address.port, ssl=context)
    except ssl.SSLCertVerificationError as error:
        return f'{address}: {_certificate_problem(error, address.host)}'
    except ssl.SSLError as error:
        if address.is_secure and error.reason in _NOT_TLS:
            return f'the server at {address.target} does not use TLS; write http://{address.target}'
        return ''
    writer.close()
    return '' if address.is_secure else f'the server at {address.target} uses TLS; write https://{address.target}'


def _certificate_problem(error: ssl.SSLCertVerificationError, host: str) -> str:
    if error.verify_code == _EXPIRED:
        return "the server's certificate has expired; ask its operator to renew it"
    if error.verify_code == _NOT_YET_VALID:
        return "the server's certificate is not valid yet; check the clocks of both machines"
    if error.verify_code in _NAME_MISMATCH:
        return f"the server's certificate is not for {host}; use a host name that the certificate contains"
    remedy = 'pass the PEM file of its CA as ca= or in TWINKLE_CA'
    return f"the server's certificate is not signed by a trusted CA; {remedy}"
