"""What the gateway can be told. The fields that every service has are in the kit."""

from datetime import timedelta
from pathlib import Path
from typing import ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from services.gateway.domain.api_key import MIN_SECRET_LENGTH, SECRET_PREFIX
from services.kit.config import ServiceConfig


class UpstreamsConfig(BaseModel):
    """Where the services behind the gateway listen, `host:port`; empty: not part of this deployment."""

    model_config = ConfigDict(frozen=True, extra='forbid')

    model: str = ''
    sampler: str = ''
    data: str = ''
    checkpoint: str = ''

    def addresses(self) -> dict[str, str]:
        """Return service to address, those without one left out."""
        found = {
            'model': self.model,
            'sampler': self.sampler,
            'data': self.data,
            'checkpoint': self.checkpoint,
        }
        return {service: address for service, address in found.items() if address}


class GatewayConfig(ServiceConfig):
    """Configuration of one gateway process."""

    service: ClassVar[str] = 'gateway'

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
    server_info_freshness: timedelta = timedelta(seconds=2)
    """How long what a service says of itself is taken as true."""

    @field_validator('database_url')
    @classmethod
    def _check_database_url(cls, url: str) -> str:
        if url and not url.startswith(('sqlite:///', 'postgresql://')):
            raise ValueError('must begin with sqlite:/// or postgresql://')
        return url

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

    def database_address(self) -> str:
        """Return the URL of the database in use."""
        return self.database_url or f'sqlite:///{self.state_dir.absolute() / "gateway.db"}'

    def pepper_file(self) -> Path:
        """Return where the pepper is kept that nobody configured."""
        return self.state_dir / 'key_pepper'
