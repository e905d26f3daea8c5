"""Wires the console to the keys and to the gateway's own gRPC server."""

import os
import shutil
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

from services.gateway.config import GatewayConfig
from services.gateway.console.calls import WebCalls
from services.gateway.console.files import AppFiles
from services.gateway.console.routes import ConsoleErrors, ConsoleRoutes
from services.gateway.console.sessions import BrowserSessions, LoginLinks
from services.gateway.http.call import Route
from services.gateway.keys.authenticator import KeyVerifier
from services.gateway.keys.open import pepper_of
from services.gateway.keys.pepper import PepperedSealer
from services.kit.clock import Clock
from services.kit.rpc.channel import open_forwarding_channel
from services.kit.rpc.server import RpcServer

STATIC = Path(__file__).parent / 'static'
"""Folder of the built app."""
_MAX_FOLDER_BYTES = 60
"""Longest folder for the socket; the system limits the path of a socket to about 100 bytes."""


def open_console(
    config: GatewayConfig, server: RpcServer, verifier: KeyVerifier, stack: AsyncExitStack, *, clock: Clock
) -> list[Route]:
    """Return the routes of the console, which call `server` through a private socket; none if the console is disabled.

    Args:
        config: Configuration of the gateway.
        server: The gateway's gRPC server, not started.
        verifier: Verifier of API keys.
        stack: Closes the channel and removes the socket.
        clock: Clock of the gateway.
    """
    if not (config.console and config.http_listen):
        return []
    folder = _private_folder()
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    channel = open_forwarding_channel(server.listen_on_socket(folder / 'rpc'))
    stack.push_async_callback(channel.close)
    sessions = BrowserSessions(verifier, PepperedSealer(pepper_of(config)), clock=clock)
    calls = WebCalls(channel, server.methods, sessions, body_bytes=config.http_body_bytes, errors=ConsoleErrors())
    files = AppFiles(config.console_files or STATIC)
    return ConsoleRoutes(files, sessions, LoginLinks(clock=clock), calls).routes()


def _private_folder() -> Path:
    """Create a temporary folder with the mode 0700."""
    default = tempfile.gettempdir()
    is_short = len(os.fsencode(default)) <= _MAX_FOLDER_BYTES
    return Path(tempfile.mkdtemp(prefix='twinkle-', dir=default if is_short else '/tmp'))  # noqa: S108 (mkdtemp is safe)
