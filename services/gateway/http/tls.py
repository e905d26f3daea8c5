"""TLS for the HTTP side, with certificates that are renewed while it serves."""

import ssl
from contextlib import suppress

from services.kit.tls import TlsFiles


def renewing_context(files: TlsFiles) -> ssl.SSLContext:
    """Return a context that shows each new connection the certificate that its file holds then.

    Raises:
        ssl.SSLError: the files are of no use.
    """
    shown, latest = files.current(), _context(files)

    def choose(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        # Called for each connection, also of those who ask for no name.
        nonlocal shown, latest
        del name, context
        material = files.current()
        if material is not shown:
            # Where the files have changed once more meanwhile, the next connection sees to it.
            with suppress(OSError):
                shown, latest = material, _context(files)
        connection.context = latest

    first = _context(files)
    first.sni_callback = choose
    return first


def _context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(['http/1.1'])
    context.load_cert_chain(*files.paths)
    return context
