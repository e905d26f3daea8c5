"""A channel that uses renewed certificates without being reopened."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import grpc

from twinkle_services.kit.rpc.credentials import channel_credentials
from twinkle_services.kit.tls import TlsFiles


class RenewingChannel(grpc.aio.Channel):
    """Makes each call over a channel with the current certificate.

    A gRPC channel uses the certificate with which it was opened. After a renewal, new calls use a new channel, and
    running calls complete on the previous one.
    """

    def __init__(self, files: TlsFiles, opened: Callable[[grpc.ChannelCredentials], grpc.aio.Channel]) -> None:
        """Open the first channel.

        Args:
            files: Certificate, key and trusted authorities.
            opened: Opens a channel with the given credentials.
        """
        self._files = files
        self._opened = opened
        self._material = files.current()
        self._channel = opened(channel_credentials(self._material))
        self._previous: list[grpc.aio.Channel] = []
        """Previous channels, closed together with the current one: closing one earlier would cancel its calls."""

    def current(self) -> grpc.aio.Channel:
        """Return the channel for a new call."""
        material = self._files.current()
        if material is not self._material:
            self._previous.append(self._channel)
            self._material, self._channel = material, self._opened(channel_credentials(material))
        return self._channel

    async def __aenter__(self) -> Self:
        """Return the channel itself; it connects on first use."""
        return self

    async def __aexit__(self, *exception: object) -> None:
        """Close all channels."""
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        """Close each channel once its calls have completed or `grace` seconds have passed; None cancels the calls."""
        for channel in (*self._previous, self._channel):
            await channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:  # noqa: FBT001, FBT002 (grpc's signature)
        """Return the state of the current channel."""
        return self.current().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Wait until the state of the current channel differs from `last_observed_state`."""
        await self.current().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Wait until the current channel is connected."""
        await self.current().channel_ready()

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        """Return a callable for a method; see `grpc.aio.Channel`."""
        return _RenewedMethod(self, lambda channel: channel.unary_unary(*arguments, **options))

    def unary_stream(self, *arguments: Any, **options: Any) -> Any:
        """Return a callable for a method; see `grpc.aio.Channel`."""
        return _RenewedMethod(self, lambda channel: channel.unary_stream(*arguments, **options))

    def stream_unary(self, *arguments: Any, **options: Any) -> Any:
        """Return a callable for a method; see `grpc.aio.Channel`."""
        return _RenewedMethod(self, lambda channel: channel.stream_unary(*arguments, **options))

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        """Return a callable for a method; see `grpc.aio.Channel`."""
        return _RenewedMethod(self, lambda channel: channel.stream_stream(*arguments, **options))


class _RenewedMethod:
    """A method that uses the current channel for each call."""

    def __init__(self, owner: RenewingChannel, create: Callable[[grpc.aio.Channel], Callable[..., Any]]) -> None:
        self._owner = owner
        self._create = create
        self._channel = owner.current()
        self._method = create(self._channel)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        channel = self._owner.current()
        if channel is not self._channel:
            self._channel, self._method = channel, self._create(channel)
        return self._method(*arguments, **options)
