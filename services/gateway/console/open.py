"""Wires the console to the keys and to the gateway's own gRPC server."""

from contextlib import AsyncExitStack
from pathlib import Path

from twinkle.socket_folder import SocketFolder
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
    folder = SocketFolder('twinkle-console-')
    stack.callback(folder.remove)
    channel = open_forwarding_channel(server.listen_on_socket(folder.path / 'rpc'))
    stack.push_async_callback(channel.close)
    sessions = BrowserSessions(verifier, PepperedSealer(pepper_of(config)), clock=clock)
    calls = WebCalls(channel, server.methods, sessions, body_bytes=config.http_body_bytes, errors=ConsoleErrors())
    files = AppFiles(config.console_files or STATIC)
    return ConsoleRoutes(files, sessions, LoginLinks(clock=clock), calls=calls, checkpoints=checkpoints).routes()
