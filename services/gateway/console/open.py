"""Wires the console to the keys and to the gateway's own gRPC server."""

import os
import shutil
import socket
import tempfile
import time
from contextlib import AsyncExitStack, suppress
from datetime import timedelta
from pathlib import Path

from twinkle_services.gateway.catalogue.grpc import GrpcCheckpoints
from twinkle_services.gateway.config import GatewayConfig
from twinkle_services.gateway.console.calls import WebCalls
from twinkle_services.gateway.console.files import AppFiles
from twinkle_services.gateway.console.routes import ConsoleErrors, ConsoleRoutes
from twinkle_services.gateway.console.sessions import BrowserSessions, LoginLinks
from twinkle_services.gateway.http.call import Route
from twinkle_services.gateway.keys.authenticator import KeyVerifier
from twinkle_services.gateway.keys.open import pepper_of
from twinkle_services.gateway.keys.pepper import PepperedSealer
from twinkle_services.kit.clock import Clock
from twinkle_services.kit.rpc.channel import open_forwarding_channel
from twinkle_services.kit.rpc.server import RpcServer

STATIC = Path(__file__).parent / 'static'
"""Folder of the built app."""
_PREFIX, _SOCKET = 'twinkle-console-', 'rpc'
"""Names of the folder of the socket, and of the socket."""
_MIN_AGE = timedelta(minutes=1)
"""Age below which a socket without a listener may belong to a gateway that is starting."""
_PROBE_SECONDS = 0.2
_MAX_FOLDER_BYTES = 60
"""Longest folder for the socket; the system limits the path of a socket to about 100 bytes."""


def open_console(
    config: GatewayConfig,
    server: RpcServer,
    verifier: KeyVerifier,
    stack: AsyncExitStack,
    *,
    checkpoints: GrpcCheckpoints,
    clock: Clock,
) -> list[Route]:
    """Return the routes of the console, which call `server` through a private socket; [] if the console is disabled.

    Args:
        config: Configuration of the gateway.
        server: The gateway's gRPC server, not started.
        verifier: Verifier of API keys.
        stack: Closes the channel and removes the socket.
        checkpoints: Client of the checkpoint service.
        clock: Clock of the gateway.
    """
    if not (config.console and config.http_listen):
        return []
    folder = _private_folder()
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    channel = open_forwarding_channel(server.listen_on_socket(folder / _SOCKET))
    stack.push_async_callback(channel.close)
    sessions = BrowserSessions(verifier, PepperedSealer(pepper_of(config)), clock=clock)
    calls = WebCalls(channel, server.methods, sessions, body_bytes=config.http_body_bytes, errors=ConsoleErrors())
    files = AppFiles(config.console_files or STATIC)
    return ConsoleRoutes(files, sessions, LoginLinks(clock=clock), calls=calls, checkpoints=checkpoints).routes()


def _private_folder() -> Path:
    """Create a temporary folder with the mode 0700."""
    default = tempfile.gettempdir()
    parent = Path(default if len(os.fsencode(default)) <= _MAX_FOLDER_BYTES else '/tmp')  # noqa: S108 (mkdtemp is safe)
    remove_abandoned(parent)
    return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))


def remove_abandoned(parent: Path) -> None:
    """Remove the folders in `parent` that gateways of this user left behind when they were killed."""
    for path in parent.glob(f'{_PREFIX}*/{_SOCKET}'):
        # Another gateway may remove the same folder.
        with suppress(OSError):
            if _is_abandoned(path):
                shutil.rmtree(path.parent)


def _is_abandoned(path: Path) -> bool:
    """Return whether no process accepts connections at a socket of this user that has existed for some time."""
    status = path.stat()
    if status.st_uid != os.getuid() or time.time() - status.st_mtime < _MIN_AGE.total_seconds():
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_PROBE_SECONDS)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
    return False
