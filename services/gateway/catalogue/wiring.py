"""Opens the verbs that change checkpoints."""

from collections.abc import Mapping

import grpc

from services.gateway.catalogue.change_checkpoints import ChangeCheckpoints
from services.gateway.catalogue.grpc_checkpoints import GrpcCheckpoints
from services.gateway.catalogue.sql import SqlCheckpointStore
from services.gateway.config import GatewayConfig
from services.gateway.store.database import Database
from services.kit.clock import Clock
from services.kit.rpc.context import current_caller

Channels = Mapping[str, grpc.aio.Channel]
"""Bare ones to the services behind the gateway, by service."""


def change_checkpoints(
    config: GatewayConfig, database: Database, channels: Channels, *, clock: Clock
) -> ChangeCheckpoints:
    """Return the verbs."""
    keeper = GrpcCheckpoints(channels.get('checkpoint'), internal_token=config.internal_token)
    return ChangeCheckpoints(keeper, SqlCheckpointStore(database), caller=current_caller, clock=clock)
