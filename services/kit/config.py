"""Typed configuration: one frozen object a service, read once at the start.

Values come, the later winning, from the defaults, a YAML file (`--config`), the environment
(`TWINKLE_<SERVICE>_<FIELD>`, nested fields joined by `__`) and `--set field.sub=value`.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar, cast

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from services.kit.telemetry import TelemetryConfig
from services.kit.tls import CertificateConfig, TlsConfig, load_material


class LimitsConfig(BaseModel):
    """Bounds that keep one caller from harming the others."""

    model_config = ConfigDict(frozen=True, extra='forbid')

    message_bytes: int = Field(default=64 << 20, ge=1 << 10)
    """Most bytes of one message; larger ones are refused with their size named."""
    bytes_per_tenant: int = Field(default=256 << 20, ge=1 << 16)
    """Bytes of a tenant's messages that are served at a time; those beyond wait, and are refused after a while."""
    bytes_in_all: int = Field(default=1 << 30, ge=1 << 16)
    """The same, of all tenants."""
    bytes_wait: timedelta = Field(default=timedelta(seconds=5), ge=timedelta())
    """How long a message waits for room."""
    queue_length: int = Field(default=1024, ge=1)
    """Operations or requests one tenant may have waiting."""


@dataclass(frozen=True)
class Listener:
    """A place to listen."""

    address: str
    """'host:port'; port 0 picks a free one."""
    tls: CertificateConfig
    """Its certificate; without one it is plaintext."""
    is_mutual: bool = False
    """Whether callers have to show a certificate."""
    field: str = 'listen'
    """Setting that says where, for messages."""
    tls_field: str = 'tls'
    """Setting that has the certificate."""


class ServiceConfig(BaseModel):
    """What every service can be told."""

    model_config = ConfigDict(frozen=True, extra='forbid')
    service: ClassVar[str] = ''
    """Name of the service; set by each subclass."""
    callers: ClassVar[tuple[str, ...]] = ()
    """Services that have to call this one; set by each subclass."""

    listen: str = '127.0.0.1:0'
    """Address to serve on, `host:port`; port 0 picks a free one."""
    state_dir: Path = Path('.twinkle')
    """Folder for everything the service keeps."""
    address_file: Path | None = None
    """Where to write the address and process id once it serves. Unset: nowhere."""
    internal_token: str = Field(default='', repr=False)
    """Secret shared by the services. Empty: anyone is trusted, which is refused unless on loopback."""
    tls: TlsConfig = TlsConfig()
    drain_seconds: float = Field(default=10.0, ge=0)
    """How long running calls may go on after a stop was asked for."""
    limits: LimitsConfig = LimitsConfig()
    telemetry: TelemetryConfig = TelemetryConfig()

    @model_validator(mode='after')
    def _check_peers(self) -> Self:
        if self.peers() and (self.tls.ca is None or self.tls.certificate is None):
            missing = 'tls.ca: give the authorities' if self.tls.ca is None else 'tls.certificate: give one'
            raise ValueError(f'{missing}, or set tls.trusted_peers to [] to ask nobody for a certificate')
        return self

    def peers(self) -> frozenset[str]:
        """Return the names of which one must be in the certificate of whoever calls; empty: none is asked for."""
        if self.tls.trusted_peers is not None:
            return frozenset(self.tls.trusted_peers)
        return frozenset(f'twinkle://{name}' for name in self.callers) if self.tls.certificate else frozenset()

    def is_between_services(self, method: str) -> bool:
        """Whether only services may call a method ('package.Service/Method'), as in all but the gateway."""
        del method
        return True

    def listeners(self) -> tuple[Listener, ...]:
        """Return where to listen, and how."""
        return (Listener(self.listen, self.tls, is_mutual=bool(self.peers())),)


_Config = TypeVar('_Config', bound=ServiceConfig)
_NOT_FIELDS = frozenset({'TWINKLE_MODEL_ID_ALIASES'})
"""Variables of the component library whose names begin as those of a service's fields do."""


def load_config(config_class: type[_Config], arguments: Sequence[str] | None = None) -> _Config:
    """Return the configuration of this process.

    Args:
        config_class: the service's own configuration class.
        arguments: command line without the program's name. Unset: that of the process.

    Raises:
        SystemExit: the command line, file or a value is wrong; the message names it and the cure.
    """
    service = config_class.service
    parser = argparse.ArgumentParser(
        prog=f'python -m services.{service}',
        description=f'The {service} service of Twinkle.',
        epilog='Fields: ' + ', '.join(config_class.model_fields),
    )
    parser.add_argument('--config', type=Path, metavar='FILE', help='YAML file with any of the fields')
    parser.add_argument('--set', action='append', default=[], metavar='FIELD=VALUE', help='one field, such as a.b=1')
    options = parser.parse_args(arguments)
    try:
        values = _read_file(options.config) if options.config else {}
        _merge(values, _from_environment(service, os.environ))
        for assignment in cast(list[str], options.set):
            field, _, text = assignment.partition('=')
            _assign(values, field.split('.'), yaml.safe_load(text))
        config = config_class.model_validate(values)
        load_material(config.tls)
        for listener in config.listeners():
            load_material(listener.tls, field=listener.tls_field)
        return config
    except (OSError, ValueError, yaml.YAMLError) as error:
        parser.exit(2, f'{parser.prog}: {_explain(error)}\n')


def _read_file(path: Path) -> dict[str, Any]:
    content = yaml.safe_load(path.read_text(encoding='utf-8'))
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f'{path}: the file must be a mapping of field names to values')
    return cast(dict[str, Any], content)


def _from_environment(service: str, environment: Mapping[str, str]) -> dict[str, Any]:
    prefix = f'TWINKLE_{service.upper()}_'
    values: dict[str, Any] = {}
    for name, text in environment.items():
        if name.startswith(prefix) and name not in _NOT_FIELDS:
            _assign(values, name[len(prefix) :].lower().split('__'), yaml.safe_load(text))
    return values


def _assign(values: dict[str, Any], path: Sequence[str], value: object) -> None:
    *parents, last = path
    for name in parents:
        values = values.setdefault(name, {})
    values[last] = value


def _merge(target: dict[str, Any], extra: Mapping[str, Any]) -> None:
    for name, value in extra.items():
        if isinstance(value, dict) and isinstance(target.get(name), dict):
            _merge(target[name], cast(dict[str, Any], value))
        else:
            target[name] = value


def _explain(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return '; '.join(f'{".".join(map(str, item["loc"]))}: {item["msg"]}' for item in error.errors())
    return str(error)
