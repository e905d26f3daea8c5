"""Configuration of the gateway. The settings that all services share are in `twinkle_services.kit.config`."""

import re
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from twinkle_services.gateway.credentials import MIN_SECRET_LENGTH, SECRET_PREFIX, Access, requirement_of
from twinkle_services.kit.config import HttpAddress, Listener, ServiceConfig, is_loopback
from twinkle_services.kit.tls import CertificateConfig

_HUB_ID = re.compile(r'\w[\w.-]*(/\w[\w.-]*)?')


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra='forbid')


class UpstreamsConfig(_Section):
    """Addresses of the services behind the gateway, as `host:port`. Empty: the service is not deployed."""

    model: str = ''
    """Address of the model service."""
    models: tuple[str, ...] = ()
    """Further model services, with the same or other base models. New runs of a base model go to the service with the
    most free memory for adapters, and each run stays with its service (docs/gateways.md)."""
    sampler: str = ''
    """Address of a sampler, in addition to those that register with the gateway."""
    data: str = ''
    """Address of the data service."""
    checkpoint: str = ''
    """Address of the checkpoint service."""

    @field_validator('models')
    @classmethod
    def _check_models(cls, addresses: tuple[str, ...]) -> tuple[str, ...]:
        if not all(addresses):
            raise ValueError('must not have an empty address; remove it, or give host:port')
        return addresses

    @model_validator(mode='after')
    def _check_duplicates(self) -> Self:
        addresses = list(self.model_addresses().values())
        if len(set(addresses)) < len(addresses):
            raise ValueError('models: an address is listed twice, here or in `model`; list each address once')
        return self

    def model_addresses(self) -> dict[str, str]:
        """Return the addresses of model services by unique names: 'model', 'model-2' and so on."""
        addresses = [*([self.model] if self.model else []), *self.models]
        return {'model' if index == 0 else f'model-{index + 1}': item for index, item in enumerate(addresses)}

    def addresses(self) -> dict[str, str]:
        """Return the addresses of all deployed services by name."""
        others = {'sampler': self.sampler, 'data': self.data, 'checkpoint': self.checkpoint}
        return {**self.model_addresses(), **{service: address for service, address in others.items() if address}}


class FleetConfig(_Section):
    """Settings of the sampler fleet."""

    lease: timedelta = Field(default=timedelta(seconds=10), ge=timedelta(milliseconds=100))
    """Time without a heartbeat after which a replica is lost."""
    forget_after: timedelta = Field(default=timedelta(minutes=5), ge=timedelta())
    """Time for which a lost replica stays listed."""
    replica_wait: timedelta = Field(default=timedelta(seconds=30), ge=timedelta())
    """Time for which a started response waits for another sampler that can continue it."""
    begin_wait: timedelta = Field(default=timedelta(seconds=1), ge=timedelta())
    """Time for which a new request waits if no sampler is available, for example because all have left the fleet. The
    request is then refused with NO_REPLICA, and clients repeat it."""
    waiting_per_tenant: int = Field(default=1024, ge=1)
    """Maximum number of a tenant's waiting requests for each sampler. If all are full, further requests are refused."""
    relay_fan_out: int = Field(default=0, ge=0)
    """Number of samplers to which each sampler relays weights. With 0, all samplers use the checkpoint service."""
    checkpoint_address: str = ''
    """Address of the checkpoint service for replicas, `host:port`. Empty: the address that the gateway uses."""


class FuturesConfig(_Section):
    """Settings of futures: requests that are accepted immediately and whose results are fetched later."""

    payload_dir: Path | None = None
    """Folder for requests and results. Gateways that share a database need the same folder, such as a network mount.
    Unset: `payloads` in the state folder."""
    gap: timedelta = Field(default=timedelta(seconds=330), gt=timedelta())
    """Time for which a request waits for a missing earlier request of its lane. It must exceed the time for which
    clients retry a failed request, 300 seconds in the Tinker SDK."""
    lease: timedelta = Field(default=timedelta(seconds=10), ge=timedelta(seconds=1))
    """Time without a heartbeat after which another gateway on the same PostgreSQL database takes over this gateway's
    futures. If this gateway's database connection is closed, for example because the process was killed, the futures
    are taken over after three tenths of this time."""
    lanes_per_tenant: int = Field(default=64, ge=1)
    """Maximum number of a tenant's ordered requests that run at the same time per base model, at most one per lane.
    Running requests are held in memory."""
    lanes: int = Field(default=128, ge=1)
    """Like `lanes_per_tenant`, but for all tenants together."""
    unordered_per_tenant: int = Field(default=256, ge=1)
    """Maximum number of a tenant's other requests that run at the same time per base model."""
    unordered: int = Field(default=1024, ge=1)
    """Like `unordered_per_tenant`, but for all tenants together."""
    waiting_per_tenant: int = Field(default=4096, ge=1)
    """Maximum number of unfinished requests of a tenant; further requests are refused."""
    waiting: int = Field(default=32768, ge=1)
    """Like `waiting_per_tenant`, but for all tenants together; each request takes a few kilobytes of memory."""
    waiting_bytes_per_tenant: int = Field(default=4 << 30, ge=1 << 10)
    """Maximum total bytes of a tenant's unfinished requests, which are stored on disk."""
    waiting_bytes: int = Field(default=16 << 30, ge=1 << 10)
    """Like `waiting_bytes_per_tenant`, but for all tenants together."""
    running_bytes_per_tenant: int = Field(default=256 << 20, ge=1 << 10)
    """Maximum total bytes of a tenant's running ordered requests, which are in memory; further requests wait. An equal,
    separate limit applies to the tenant's other requests."""
    running_bytes: int = Field(default=1 << 30, ge=1 << 10)
    """Like `running_bytes_per_tenant`, but for all tenants together; one tenant can use at most 15/32 of this value."""
    results_for: timedelta = Field(default=timedelta(hours=6), ge=timedelta(minutes=1))
    """Time after the end of a request for which its result can be fetched."""
    records_for: timedelta = Field(default=timedelta(days=7), ge=timedelta(minutes=1))
    """Time after the end of a request for which its record stays stored. While the record is stored without the result,
    a fetch reports an expired request instead of an unknown one."""
    sweep_interval: timedelta = Field(default=timedelta(minutes=1), gt=timedelta())
    """Interval between deletions of expired results and records."""


class ExportsConfig(_Section):
    """Settings of exports to hubs and folders."""

    folder: Path | None = None
    """Folder for exports to `file:///`, with a subfolder for each tenant. Unset: such exports are disabled."""
    at_once: int = Field(default=2, ge=0)
    """Maximum number of exports that run at the same time, each with an archive in the state folder. With 0, only other
    gateways on the same database run exports."""
    attempts: int = Field(default=12, ge=1)
    """Maximum number of attempts of an export. Only temporary errors are retried, after pauses of up to ten minutes."""
    upload_time: timedelta = Field(default=timedelta(hours=6), gt=timedelta())
    """Time limit of one upload."""
    lease: timedelta = Field(default=timedelta(seconds=30), ge=timedelta(seconds=1))
    """Time without renewal after which another gateway may take over an export."""
    poll: timedelta = Field(default=timedelta(seconds=5), gt=timedelta())
    """Interval between polls for retries and for exports of other gateways. Exports accepted here need no poll."""
    keep_for: timedelta = Field(default=timedelta(days=30), ge=timedelta(minutes=1))
    """Time for which a finished export stays listed."""


class MemoryConfig(_Section):
    """Limits on the memory for HTTP requests in progress. A request over a limit waits, and may then be refused."""

    bodies_per_tenant: int = Field(default=256 << 20, ge=1 << 16)
    """Total bytes of a tenant's HTTP request bodies and large responses; `limits` applies to gRPC messages."""
    bodies: int = Field(default=1 << 30, ge=1 << 16)
    """Like `bodies_per_tenant`, but for all tenants together; one tenant can use at most 15/32 of this value."""
    work_per_tenant: int = Field(default=512 << 20, ge=1 << 16)
    """Estimated total bytes of the values that are parsed from a tenant's bodies."""
    work: int = Field(default=1 << 30, ge=1 << 16)
    """Like `work_per_tenant`, but for all tenants together; one tenant can use at most 15/32 of this value."""
    wait: timedelta = Field(default=timedelta(seconds=5), ge=timedelta())
    """Time for which a request waits for memory before it is refused with a retryable error."""


class QuotasConfig(_Section):
    """Default quota of tenants, and settings of quotas and usage. An unset limit means unlimited."""

    max_adapters: int | None = Field(default=None, ge=0)
    """Maximum number of adapters."""
    tokens_per_second: int | None = Field(default=None, ge=1)
    """Maximum long-term rate of trained, sampled and prompt tokens together."""
    burst_tokens: int | None = Field(default=None, ge=1)
    """Tokens that a tenant may use at once after a pause. Unset: ten seconds of `tokens_per_second`."""
    concurrent_samples: int | None = Field(default=None, ge=0)
    """Maximum number of concurrent sampling requests."""
    stored_bytes: int | None = Field(default=None, ge=0)
    """Maximum total bytes of checkpoints, datasets and uploads."""
    metric_points: int | None = Field(default=None, ge=0)
    """Maximum number of values of metrics that are stored for all runs together."""
    weight: float = Field(default=1.0, ge=0.01, le=100.0)
    """Relative share when several tenants wait; `quotas.rules` defines its bounds."""
    patience: timedelta = Field(default=timedelta(seconds=5), ge=timedelta())
    """Maximum time for which a call waits for its tenant's token rate. A call that would wait longer is refused."""
    refresh: timedelta = Field(default=timedelta(seconds=2), gt=timedelta())
    """Interval at which quotas are read again, because other gateways may change them."""
    usage_interval: timedelta = Field(default=timedelta(seconds=1), gt=timedelta())
    """Interval between writes of usage. If the process is killed, sampling usage since the last write is lost."""


class GatewayConfig(ServiceConfig):
    """Configuration of one gateway process."""

    service: ClassVar[str] = 'gateway'
    callers: ClassVar[tuple[str, ...]] = ('sampler',)

    public_tls: CertificateConfig = CertificateConfig()
    """Certificate for clients, over gRPC and HTTP. Unset: the certificate of `tls`."""
    internal_listen: str = ''
    """Address at which samplers join the fleet, `host:port`. Empty: the address `listen`. Samplers cannot join there if
    `peers()` is not empty, because `listen` requests no client certificates."""
    database_url: str = Field(default='', repr=False)
    """`sqlite:///<path>` or `postgresql://...`. Empty: `gateway.db` in the state folder."""
    accept_data_loss: bool = False
    """Whether to start although the SQLite database lost committed transactions or has damaged rows, for example
    because its write-ahead log was damaged. Set this for one start only."""
    upstreams: UpstreamsConfig = UpstreamsConfig()
    bootstrap_key: str = Field(default='', repr=False)
    """Secret of an initial API key of the tenant 'default' with all scopes. Empty: no key is created."""
    key_pepper: str = Field(default='', repr=False)
    """Hexadecimal secret for the digests of API keys and for stored hub tokens. Gateways that share a database need the
    same secret. Empty: the first start creates a secret and stores it in the state folder."""
    key_memory: timedelta = timedelta(seconds=5)
    """Time for which a verified key is cached. A key revoked at another gateway stays valid here at most that long."""
    heartbeat_interval: timedelta = Field(default=timedelta(seconds=30), gt=timedelta())
    """Interval at which clients should send heartbeats."""
    session_lifetime: timedelta = timedelta(minutes=5)
    """Time without a heartbeat after which a session expires. It must be longer than `heartbeat_interval`."""
    fleet: FleetConfig = FleetConfig()
    futures: FuturesConfig = FuturesConfig()
    quotas: QuotasConfig = QuotasConfig()
    metric_points_per_run: int = Field(default=1_000_000, ge=1)
    """Maximum number of values of metrics that are stored for a run."""
    rollout_bytes_per_run: int = Field(default=256 << 20, ge=1 << 10)
    """Maximum size of the rollouts that are stored for a run, compressed. When a run reaches this size, its oldest
    rollouts are removed."""
    exports: ExportsConfig = ExportsConfig()
    http_listen: HttpAddress = ''
    """Address of the HTTP APIs, `host:port`; port 0 picks a free port. Empty: the HTTP APIs are disabled."""
    http_address_file: Path | None = None
    """File to which the gateway writes the address of the HTTP APIs once they are served."""
    console: bool = True
    """Whether `http_listen` also serves the console, the web app at `/console/`."""
    console_files: Path | None = None
    """Folder with the built app of the console. Unset: the app in the installed package."""
    http_connections: int = Field(default=4096, ge=1)
    """Maximum number of open HTTP connections; the gateway closes further ones immediately."""
    memory: MemoryConfig = MemoryConfig()
    http_body_bytes: int = Field(default=4 << 20, ge=1 << 10)
    """Largest request body of the OpenAI API and of the console in bytes; a token takes about seven bytes as JSON."""
    tokenizers: Mapping[str, str] = Field(default_factory=dict[str, str])
    """Hub ids of the repositories with the tokenizers, by base model, for clients of the Tinker API. The default is the
    name of the base model."""
    tinker_trains_unembed: bool = False
    """Whether `train_unembed`, which is on by default in Tinker clients, adds an adapter to the output head. vLLM
    cannot serve such adapters, so set this only if all samplers run the torch engine."""
    tinker_body_bytes: int = Field(default=64 << 20, ge=1 << 10)
    """Largest batch of examples sent to the Tinker API, in bytes, both as received and decompressed. Tinker clients
    split batches at about 5 MB."""
    server_info_freshness: timedelta = timedelta(seconds=2)
    """Time for which the server information of a service is cached."""

    @field_validator('database_url')
    @classmethod
    def _check_database_url(cls, url: str) -> str:
        if url and not url.startswith(('sqlite:///', 'postgresql://')):
            raise ValueError('must begin with sqlite:/// or postgresql://')
        return url

    @field_validator('tokenizers')
    @classmethod
    def _check_tokenizers(cls, tokenizers: Mapping[str, str]) -> Mapping[str, str]:
        for hub_id in tokenizers.values():
            if not _HUB_ID.fullmatch(hub_id):
                raise ValueError(f'{hub_id!r} is not the id of a repository on a hub; use org/name')
        return tokenizers

    @field_validator('bootstrap_key')
    @classmethod
    def _check_bootstrap_key(cls, secret: str) -> str:
        if secret and (not secret.startswith(SECRET_PREFIX) or len(secret) < MIN_SECRET_LENGTH):
            raise ValueError(f'must begin with {SECRET_PREFIX!r} and have at least {MIN_SECRET_LENGTH} characters')
        return secret

    @field_validator('key_pepper')
    @classmethod
    def _check_key_pepper(cls, pepper: str) -> str:
        if pepper and len(bytes.fromhex(pepper)) < 16:
            raise ValueError(f'must have at least 32 hexadecimal digits, got {len(pepper)}')
        return pepper

    @model_validator(mode='after')
    def _check_lifetime(self) -> Self:
        if self.session_lifetime <= self.heartbeat_interval:
            raise ValueError('session_lifetime must be longer than heartbeat_interval; increase it')
        return self

    def peers(self) -> frozenset[str]:
        """Return the names accepted in the certificates of calling services; empty if they need no certificate."""
        return super().peers() if self.tls.ca or self.tls.trusted_peers else frozenset()

    def is_between_services(self, method: str) -> bool:
        """Return whether only services may call a method ('package.Service/Method')."""
        return requirement_of(method) is Access.INTERNAL

    def listeners(self) -> tuple[Listener, ...]:
        """Return the listener for clients and, if it is separate, the one for services."""
        public = self.public_tls if self.public_tls.certificate else self.tls
        field = 'public_tls' if public is self.public_tls else 'tls'
        listeners = [Listener(self.listen, public, tls_field=field)]
        if self.internal_listen:
            is_mutual = bool(self.peers())
            listeners.append(Listener(self.internal_listen, self.tls, is_mutual=is_mutual, field='internal_listen'))
        return tuple(listeners)

    def database_address(self) -> str:
        """Return the URL of the database in use."""
        return self.database_url or f'sqlite:///{self.state_dir.absolute() / "gateway.db"}'

    def payload_folder(self) -> Path:
        """Return the folder for requests and results of futures."""
        return self.futures.payload_dir or self.state_dir / 'payloads'

    def pepper_file(self) -> Path:
        """Return the path of the file with the pepper; the file is used only if `key_pepper` is empty."""
        return self.state_dir / 'key_pepper'

    def is_on_loopback(self) -> bool:
        """Return whether the gRPC addresses can be reached from this host only."""
        return all(is_loopback(address) for address in (self.listen, self.internal_listen) if address)
