"""Wires the catalogue to a database, and creates the background job that follows the checkpoint service."""

from dataclasses import dataclass

import grpc

from twinkle_services.gateway.catalogue.checkpoints import Checkpoints
from twinkle_services.gateway.catalogue.follow import FeedFollower
from twinkle_services.gateway.catalogue.grpc import GrpcCheckpointFeed, GrpcCheckpoints
from twinkle_services.gateway.catalogue.runs import Runs
from twinkle_services.gateway.catalogue.sql import SqlCheckpointStore, SqlRunStore
from twinkle_services.gateway.sessions.sweep import Job
from twinkle_services.gateway.store.database import Database
from twinkle_services.kit.clock import Clock


@dataclass(frozen=True)
class Catalogue:
    """Runs and checkpoints of all tenants."""

    runs: Runs
    checkpoints: Checkpoints
    client: GrpcCheckpoints
    """Client of the checkpoint service."""


def open_catalogue(database: Database, client: GrpcCheckpoints, *, clock: Clock) -> Catalogue:
    """Return the catalogue that is stored in `database` and changes checkpoints through `client`."""
    checkpoints = Checkpoints(client, SqlCheckpointStore(database), clock=clock)
    return Catalogue(Runs(SqlRunStore(database)), checkpoints, client)


def checkpoint_jobs(database: Database, channel: grpc.aio.Channel | None, *, clock: Clock) -> list[Job]:
    """Return a list with the job that copies checkpoints to the catalogue, or an empty list without a `channel`."""
    if channel is None:
        return []
    feed, store = GrpcCheckpointFeed(channel), SqlCheckpointStore(database)
    return [FeedFollower('checkpoints', feed=feed, store=store, clock=clock).run]
