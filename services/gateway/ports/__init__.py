"""What the gateway's verbs need of the world, one topic a file.

Concurrency: every verb of a store is one transaction, and keeps what it changed across a kill at any moment;
several gateways may share a store.
"""

from services.gateway.ports.catalogue import CheckpointKeeper, CheckpointStore, Feed, RunStore, Shelf
from services.gateway.ports.exports import ArchiveSource, Destination, ExportStore, Sealer, Sent
from services.gateway.ports.fleet import Connections, SamplerFacts
from services.gateway.ports.futures import Executor, Futures, FutureStore, PayloadStore
from services.gateway.ports.keys import KeyStore, SecretHasher
from services.gateway.ports.models import ModelFacts, ModelRoutes
from services.gateway.ports.peers import Peers
from services.gateway.ports.quotas import AdapterCensus, QuotaStore, UsageStore
from services.gateway.ports.sampling import Samplers
from services.gateway.ports.sessions import SessionStore
from services.gateway.ports.tenants import ProjectStore, TenantStore
from services.gateway.ports.trainer import AdapterKeeper, ParkedAdapter, Trainer

__all__ = [
    'AdapterCensus',
    'AdapterKeeper',
    'ArchiveSource',
    'CheckpointKeeper',
    'CheckpointStore',
    'Connections',
    'Destination',
    'Executor',
    'ExportStore',
    'Feed',
    'FutureStore',
    'Futures',
    'KeyStore',
    'ModelFacts',
    'ModelRoutes',
    'ParkedAdapter',
    'PayloadStore',
    'Peers',
    'ProjectStore',
    'QuotaStore',
    'RunStore',
    'SamplerFacts',
    'Samplers',
    'Sealer',
    'SecretHasher',
    'Sent',
    'SessionStore',
    'Shelf',
    'TenantStore',
    'Trainer',
    'UsageStore',
]
