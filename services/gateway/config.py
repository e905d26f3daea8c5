"""What the gateway can be told. The fields that every service has are in the kit."""

import ipaddress
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from services.gateway.credentials import MIN_SECRET_LENGTH, SECRET_PREFIX, Access, requirement_of
from services.kit.config import Listener, ServiceConfig
from services.kit.tls import CertificateConfig


class UpstreamsConfig(BaseModel):
    """Where the services behind the gateway listen, `host:port`; empty: not part of this deployment."""

    model_config = ConfigDict(frozen=True, extra='forbid')

    model: str = ''
    models: tuple[str, ...] = ()
    """Model services, one for each base model; those beside `model`, where that is given as well. Of two with one base
    model the first is used."""
    sampler: str = ''
    data: str = ''
    checkpoint: str = ''

    @field_validator('models')
    @classmethod
    def _check_models(cls, addresses: tuple[str, ...]) -> tuple[str, ...]:
        if not all(addresses):
            raise ValueError('must not have an empty address')
        return addresses

    @model_validator(mode='after')
    def _check_twice(self) -> Self:
        addresses = list(self.model_addresses().values())
        if len(set(addresses)) < len(addresses):
            raise ValueError('models: an address is there twice')
        return self

    def model_addresses(self) -> dict[str, str]:
        """Return the addresses of model services by names that tell them apart: 'model', 'model-2' and so on."""
        addresses = [*([self.model] if self.model else []), *self.models]
        return {'model' if index == 0 else f'model-{index + 1}': item for index, item in enumerate(addresses)}

    def addresses(self) -> dict[str, str]:
        """Return service to address, those without one left out."""
        others = {'sampler': self.sampler, 'data': self.data, 'checkpoint': self.checkpoint}
        return {**self.model_addresses(), **{service: address for service, address in others.items() if address}}


class FleetConfig(BaseModel):
    """How the fleet is kept and used."""

    model_config = ConfigDict(frozen=True, extra='forbid')

    lease: timedelta = Field(default=timedelta(seconds=10), ge=timedelta(milliseconds=100))
    """Silence after which a replica is lost."""
    forget_after: timedelta = Field(default=timedelta(minutes=5), ge=timedelta())
    """How long a lost replica is shown."""
    replica_wait: timedelta = Field(default=timedelta(seconds=30), ge=timedelta())
    """How long an answer that has begun waits for a sampler to go on with it."""
    begin_wait: timedelta = Field(default=timedelta(seconds=5), ge=timedelta())
    """How long a new request waits for a sampler where there is none now, but was one before."""
    waiting_per_tenant: int = Field(default=1024, ge=1)
    """Requests of a tenant that wait for each sampler that has as much as it runs at once; those beyond are refused."""
    relay_fan_out: int = Field(default=0, ge=0)
    """To how many others each sampler passes weights on. 0: every sampler asks the checkpoint service."""
    checkpoint_address: str = ''
    """Where replicas find the checkpoint service, `host:port`. Empty: where the gateway finds it."""


class FuturesConfig(BaseModel):
    """How futures are kept and carried out: requests that are answered at once, and whose outcome is fetched later."""

    model_config = ConfigDict(frozen=True, extra='forbid')

    payload_dir: Path | None = None
    """Where their requests and results are kept; gateways on one database need the same folder, such as a
    network mount. Unset: `payloads` in the state folder."""
    gap: timedelta = Field(default=timedelta(seconds=330), gt=timedelta())
    """How long a request waits for an earlier one of its lane that has not come. Longer than clients go on
    sending one that failed: the Tinker SDK does so for 300 seconds."""
    lease: timedelta = Field(default=timedelta(seconds=10), ge=timedelta(seconds=1))
    """Silence after which another gateway on the same PostgreSQL database carries on with what this one accepted; the
    silence of a process that was killed is told from that of a network, and ends after three tenths of it."""
    lanes_per_tenant: int = Field(default=64, ge=1)
    """How many of a tenant's ordered requests are under way at a time, one of each lane; each has its request in
    memory."""
    lanes: int = Field(default=128, ge=1)
    """The same, of all tenants."""
    unordered_per_tenant: int = Field(default=256, ge=1)
    """How many of a tenant's other requests are under way at a time."""
    unordered: int = Field(default=1024, ge=1)
    """The same, of all tenants."""
    waiting_per_tenant: int = Field(default=4096, ge=1)
    """How many accepted requests of a tenant may be unfinished; those beyond are refused."""
    waiting: int = Field(default=32768, ge=1)
    """The same, of all tenants; each takes some kilobytes of memory."""
    waiting_bytes_per_tenant: int = Field(default=4 << 30, ge=1 << 10)
    """How many bytes the accepted requests of a tenant may have that are unfinished; they are on the disk."""
    waiting_bytes: int = Field(default=16 << 30, ge=1 << 10)
    """The same, of all tenants."""
    running_bytes_per_tenant: int = Field(default=256 << 20, ge=1 << 10)
    """How many bytes a tenant's ordered requests may have that are under way, and so in memory; the rest wait. Its
    others may have as many."""
    running_bytes: int = Field(default=1 << 30, ge=1 << 10)
    """The same, of all tenants."""
    results_for: timedelta = Field(default=timedelta(hours=6), ge=timedelta(minutes=1))
    """How long a result is kept after it was ready."""
    records_for: timedelta = Field(default=timedelta(days=7), ge=timedelta(minutes=1))
    """How long a request is known to have been, so that asking for it says that it expired and not that it never
    was."""
    sweep_interval: timedelta = Field(default=timedelta(minutes=1), gt=timedelta())
    """How often what is old is looked for."""


class ExportsConfig(BaseModel):
    """How checkpoints are sent to hubs and folders."""

    model_config = ConfigDict(frozen=True, extra='forbid')

    folder: Path | None = None
    """Where exports to `file:///` go, each tenant's into a folder of its name. Unset: there are none."""
    at_once: int = Field(default=2, ge=0)
    """How many are under way at a time; each has an archive in the state folder. 0: other gateways carry them out."""
    attempts: int = Field(default=12, ge=1)
    """Tries before an export has failed; the pauses between them grow to ten minutes."""
    upload_time: timedelta = Field(default=timedelta(hours=6), gt=timedelta())
    """How long one upload may take."""
    lease: timedelta = Field(default=timedelta(seconds=30), ge=timedelta(seconds=1))
    """Silence after which another gateway takes an export over."""
    poll: timedelta = Field(default=timedelta(seconds=5), gt=timedelta())
    """How often what another gateway left, or what waits for another try, is looked for; the rest begins at once."""
    keep_for: timedelta = Field(default=timedelta(days=30), ge=timedelta(minutes=1))
    """How long an export is known that is over."""


class MemoryConfig(BaseModel):
    """How much memory requests may take while they are read and served; what finds no room is refused for now."""

    model_config = ConfigDict(frozen=True, extra='forbid')

    bodies_per_tenant: int = Field(default=256 << 20, ge=1 << 16)
    """Bytes of a tenant's bodies and answers that are under way over HTTP; `limits` bounds those of messages."""
    bodies: int = Field(default=1 << 30, ge=1 << 16)
    """The same, of all tenants."""
    work_per_tenant: int = Field(default=512 << 20, ge=1 << 16)
    """Bytes that the values made of a tenant's bodies are estimated to take."""
    work: int = Field(default=1 << 30, ge=1 << 16)
    """The same, of all tenants."""
    wait: timedelta = Field(default=timedelta(seconds=5), ge=timedelta())
    """How long a request waits for room before it is refused."""


class QuotasConfig(BaseModel):
    """What tenants may use that have no quota of their own, and how quotas are held; what is unset is unlimited."""

    model_config = ConfigDict(frozen=True, extra='forbid')

    max_adapters: int | None = Field(default=None, ge=0)
    """Adapters at a time."""
    tokens_per_second: int | None = Field(default=None, ge=1)
    """Tokens trained, sampled and of prompts, over time."""
    burst_tokens: int | None = Field(default=None, ge=1)
    """Tokens at once, after a pause. Unset: those of ten seconds."""
    concurrent_samples: int | None = Field(default=None, ge=0)
    """Sampling requests under way."""
    stored_bytes: int | None = Field(default=None, ge=0)
    """Bytes of checkpoints."""
    weight: float = Field(default=1.0, ge=0.01, le=100.0)
    """Relative share when several tenants wait; the bounds are those of `quotas.rules`."""
    patience: timedelta = Field(default=timedelta(seconds=5), ge=timedelta())
    """How long a call waits for its tenant to owe no tokens, before it is refused."""
    refresh: timedelta = Field(default=timedelta(seconds=2), gt=timedelta())
    """How often quotas are read that another gateway may have set."""
    usage_interval: timedelta = Field(default=timedelta(seconds=1), gt=timedelta())
    """How often usage is written down: a kill loses what was sampled since."""


class GatewayConfig(ServiceConfig):
    """Configuration of one gateway process."""

    service: ClassVar[str] = 'gateway'
    callers: ClassVar[tuple[str, ...]] = ('sampler',)

    public_tls: CertificateConfig = CertificateConfig()
    """What clients are shown, over gRPC and HTTP. Unset: the certificate of `tls`."""
    internal_listen: str = ''
    """Address at which samplers join the fleet, `host:port`; with authorities in `tls`, they can nowhere else.
    Empty: at `listen`."""
    database_url: str = Field(default='', repr=False)
    """`sqlite:///<path>` or `postgresql://...`. Empty: `gateway.db` in the state folder."""
    upstreams: UpstreamsConfig = UpstreamsConfig()
    bootstrap_key: str = Field(default='', repr=False)
    """A secret that works from the start, with all scopes, for the tenant 'default'. Empty: none."""
    key_pepper: str = Field(default='', repr=False)
    """Hexadecimal secret that key digests are made with; gateways on one database need the same. Empty:
    made at the first start and kept in the state folder."""
    key_memory: timedelta = timedelta(seconds=5)
    """How long a key is remembered: one revoked at another gateway works for that much longer."""
    heartbeat_interval: timedelta = Field(default=timedelta(seconds=30), gt=timedelta())
    """How often clients are asked to say that they are there."""
    session_lifetime: timedelta = timedelta(minutes=5)
    """Silence after which a session is expired; longer than the heartbeat interval."""
    fleet: FleetConfig = FleetConfig()
    futures: FuturesConfig = FuturesConfig()
    quotas: QuotasConfig = QuotasConfig()
    exports: ExportsConfig = ExportsConfig()
    http_listen: str = ''
    """Address to serve the HTTP APIs on, `host:port`; port 0 picks a free one. Empty: they are not served."""
    http_address_file: Path | None = None
    """Where to write the address of the HTTP APIs once they are served. Unset: nowhere."""
    http_connections: int = Field(default=4096, ge=1)
    """Most connections over HTTP at a time; those beyond are cut."""
    memory: MemoryConfig = MemoryConfig()
    http_body_bytes: int = Field(default=4 << 20, ge=1 << 10)
    """Most bytes of a body sent over HTTP; a token as JSON has about seven."""
    tokenizers: Mapping[str, str] = Field(default_factory=dict[str, str])
    """Where clients of the Tinker API find a base model's tokenizer, by the base model's name: a hub's id, or a folder
    that they can read. Unset: under the base model's own name."""
    tinker_trains_unembed: bool = False
    """Whether a Tinker client's `train_unembed`, which is on unless it says otherwise, adds an adapter to the output
    head. vLLM serves none there, so it is for deployments whose samplers run the torch engine."""
    tinker_body_bytes: int = Field(default=64 << 20, ge=1 << 10)
    """Most bytes of a batch of examples sent to the Tinker API, as it comes and decompressed. Its clients cut
    batches at about 5 MB."""
    server_info_freshness: timedelta = timedelta(seconds=2)
    """How long what a service says of itself is taken as true."""

    @field_validator('database_url')
    @classmethod
    def _check_database_url(cls, url: str) -> str:
        if url and not url.startswith(('sqlite:///', 'postgresql://')):
            raise ValueError('must begin with sqlite:/// or postgresql://')
        return url

    @field_validator('http_listen')
    @classmethod
    def _check_http_listen(cls, address: str) -> str:
        host, _, port = address.rpartition(':')
        if address and not (host and port.isdigit() and int(port) < 1 << 16):
            raise ValueError('must be host:port')
        return address

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
            raise ValueError('must have at least 32 hexadecimal digits')
        return pepper

    @model_validator(mode='after')
    def _check_lifetime(self) -> Self:
        if self.session_lifetime <= self.heartbeat_interval:
            raise ValueError('session_lifetime must be longer than heartbeat_interval')
        return self

    def peers(self) -> frozenset[str]:
        """Return the names of which one must be in the certificate of a service that calls; clients need none."""
        return super().peers() if self.tls.ca or self.tls.trusted_peers else frozenset()

    def is_between_services(self, method: str) -> bool:
        """Whether only services may call a method ('package.Service/Method')."""
        return requirement_of(method) is Access.INTERNAL

    def listeners(self) -> tuple[Listener, ...]:
        """Return where clients and, where it is another place, services are listened to."""
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
        """Return where requests and results of futures are kept."""
        return self.futures.payload_dir or self.state_dir / 'payloads'

    def is_commit_synced(self) -> bool:
        """Whether what the database has committed outlasts a loss of power."""
        return self.database_address().startswith('postgresql')

    def pepper_file(self) -> Path:
        """Return where the pepper is kept that nobody configured."""
        return self.state_dir / 'key_pepper'

    def is_on_loopback(self) -> bool:
        """Whether only this host can reach the gateway."""
        return all(_is_loopback(address) for address in (self.listen, self.internal_listen) if address)


def _is_loopback(address: str) -> bool:
    host = address.rpartition(':')[0].strip('[]')
    try:
        return host == 'localhost' or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
