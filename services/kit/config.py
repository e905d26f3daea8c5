"""Typed configuration of a service, read once at the start.

Values come from the defaults, a YAML file (`--config`), the environment (`TWINKLE_<SERVICE>_<FIELD>`, with nested
fields joined by `__`) and `--set field.sub=value`. Later sources override earlier ones.
"""

import argparse
import ipaddress
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar, cast

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from twinkle.data_format import base_model_id
from twinkle_services.kit.config_fields import help_text
from twinkle_services.kit.telemetry import AdminAddress, TelemetryConfig
from twinkle_services.kit.tls import CertificateConfig, TlsConfig, load_material

BaseModelId = Annotated[str, AfterValidator(base_model_id)]
"""Name of a base model; the alias of a built-in model becomes its hub id."""


def _listen_address(address: str) -> str:
    host, _, port = address.rpartition(':')
    if address and not (host and port.isdigit() and int(port) < 1 << 16):
        raise ValueError(f'must be host:port with a port of 0 to 65535, got {address!r}')
    return address


def host_of(address: str) -> str:
    """Return the host of an address `host:port`; an IPv6 address has no brackets."""
    return address.rpartition(':')[0].strip('[]')


def is_loopback(address: str) -> bool:
    """Return whether an address `host:port` can be reached from this machine only."""
    host = host_of(address)
    try:
        return host == 'localhost' or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


HttpAddress = Annotated[str, AfterValidator(_listen_address)]
"""Address that an HTTP server listens on, as `host:port`; empty for no server."""


class LimitsConfig(BaseModel):
    """Limits that protect callers from each other."""

    model_config = ConfigDict(frozen=True, extra='forbid')

    message_bytes: int = Field(default=64 << 20, ge=1 << 10)
    """Maximum size of one message in bytes. Larger messages are refused."""
    bytes_per_tenant: int = Field(default=256 << 20, ge=1 << 16)
    """Maximum bytes of a tenant's messages in progress. A value above 15/32 of `bytes_in_all` is reduced to this share.
    Further messages wait up to `bytes_wait` for free bytes."""
    bytes_in_all: int = Field(default=1 << 30, ge=1 << 16)
    """Maximum bytes of all tenants' messages in progress."""
    bytes_wait: timedelta = Field(default=timedelta(seconds=5), ge=timedelta())
    """Time after which a message that waits for free bytes is refused."""
    queue_length: int = Field(default=1024, ge=1)
    """Limit per tenant: operations in progress in the model service, prompts that wait in a sampler, and requests that
    wait in the data service."""


@dataclass(frozen=True)
class Listener:
    """An address that a service listens on."""

    address: str
    """Address as `host:port`; port 0 picks a free port."""
    tls: CertificateConfig
    """Certificate of the listener; without one, connections are plaintext."""
    is_mutual: bool = False
    """Whether callers must present a certificate."""
    field: str = 'listen'
    """Name of the setting with the address, for error messages."""
    tls_field: str = 'tls'
    """Name of the setting with the certificate, for error messages."""


class ServiceConfig(BaseModel):
    """Settings of every service."""

    model_config = ConfigDict(frozen=True, extra='forbid')
    service: ClassVar[str] = ''
    """Name of the service; set by each subclass."""
    callers: ClassVar[tuple[str, ...]] = ()
    """Names of the services that call this one; set by each subclass."""

    listen: str = '127.0.0.1:0'
    """Address to serve on, as `host:port`; port 0 picks a free port."""
    state_dir: Path = Path('.twinkle')
    """Folder for the state of the service."""
    address_file: Path | None = None
    """File that receives the address and process id once the service is ready. Unset: no file."""
    internal_token: str = Field(default='', repr=False)
    """Secret that the services share. Empty: services other than the gateway trust all callers and must listen on
    loopback."""
    tls: TlsConfig = TlsConfig()
    admin_listen: HttpAddress = ''
    """Address of the admin port, as `host:port`. It serves `/metrics`, `/livez`, `/readyz` and `/version` over HTTP,
    without credentials and TLS. Port 0 picks a free port, which the log names. Empty: no admin port, unless
    `telemetry.metrics_port` is set."""
    drain_seconds: float = Field(default=10.0, ge=0)
    """Time in seconds for running calls to complete after a stop was requested."""
    limits: LimitsConfig = LimitsConfig()
    telemetry: TelemetryConfig = TelemetryConfig()

    @model_validator(mode='after')
    def _check_peers(self) -> Self:
        if self.peers() and (self.tls.ca is None or self.tls.certificate is None):
            missing = 'tls.ca: set the authorities' if self.tls.ca is None else 'tls.certificate: set one'
            raise ValueError(f'{missing}, or set tls.trusted_peers to [] to require no client certificates')
        return self

    @model_validator(mode='after')
    def _check_admin(self) -> Self:
        if self.admin_listen and self.telemetry.metrics_port:
            raise ValueError('telemetry.metrics_port: leave it out, because admin_listen sets the address')
        return self

    def admin_address(self) -> AdminAddress:
        """Return the address of the admin port."""
        if self.telemetry.metrics_port:
            return AdminAddress(f'127.0.0.1:{self.telemetry.metrics_port}', field='telemetry.metrics_port')
        return AdminAddress(self.admin_listen)

    def peers(self) -> frozenset[str]:
        """Return the trusted names. A caller's certificate must have a trusted name, unless the set is empty."""
        if self.tls.trusted_peers is not None:
            return frozenset(self.tls.trusted_peers)
        return frozenset(f'twinkle://{name}' for name in self.callers) if self.tls.certificate else frozenset()

    def is_between_services(self, method: str) -> bool:
        """Return whether only services may call a method (`package.Service/Method`); the gateway overrides this."""
        del method
        return True

    def listeners(self) -> tuple[Listener, ...]:
        """Return the addresses to listen on."""
        return (Listener(self.listen, self.tls, is_mutual=bool(self.peers())),)


_Config = TypeVar('_Config', bound=ServiceConfig)
_NOT_FIELDS = frozenset({'TWINKLE_MODEL_ID_ALIASES'})
"""Environment variables of the component library that have the prefix of a service's fields but are not fields."""


def keep_files_private() -> None:
    """Let this process and its children create folders with mode 0700 and files with mode 0600.

    Each service calls this function at its start, because its files contain keys, data and weights of tenants.
    """
    os.umask(0o077)


def load_config(config_class: type[_Config], arguments: Sequence[str] | None = None) -> _Config:
    """Return the configuration of this process.

    Args:
        config_class: Configuration class of the service.
        arguments: Command line without the program name; None for the arguments of the process.

    Raises:
        SystemExit: The command line, the file or a value is invalid; the message names the cause and the fix.
    """
    service = config_class.service
    parser = argparse.ArgumentParser(
        prog=f'twinkle-{service}',
        description=f'The {service} service of Twinkle.',
        epilog='Fields: ' + ', '.join(config_class.model_fields),
    )
    parser.add_argument('--help-fields', action='store_true', help='print each field with its meaning, and exit')
    parser.add_argument('--config', type=Path, metavar='FILE', help='YAML file with any of the fields')
    parser.add_argument('--set', action='append', default=[], metavar='FIELD=VALUE', help='one field, such as a.b=1')
    options = parser.parse_args(arguments)
    if options.help_fields:
        sys.stdout.write(f'{help_text(config_class)}\n')
        parser.exit(0)
    try:
        values = _read_file(options.config) if options.config else {}
        _merge(values, _from_environment(service, os.environ))
        for assignment in cast(list[str], options.set):
            field, equals, text = assignment.partition('=')
            if not field or not equals:
                raise ValueError(f'--set requires FIELD=VALUE, got {assignment!r}')
            _assign(values, field.split('.'), _parsed(text))
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
            _assign(values, name[len(prefix) :].lower().split('__'), _parsed(text))
    return values


def _parsed(text: str) -> object:
    """Parse a YAML value. An empty text is an empty string instead of None, because most unset fields are empty."""
    return yaml.safe_load(text) if text else ''


def _assign(values: dict[str, Any], path: Sequence[str], value: object) -> None:
    *parents, last = path
    for name in parents:
        values = values.setdefault(name, {})
        if not isinstance(values, dict):  # pyright: ignore[reportUnnecessaryIsInstance] (a file may hold anything)
            raise ValueError(f'{".".join(path)}: {name} is not a section')
    values[last] = value


def _merge(target: dict[str, Any], extra: Mapping[str, Any]) -> None:
    for name, value in extra.items():
        if isinstance(value, dict) and isinstance(target.get(name), dict):
            _merge(target[name], cast(dict[str, Any], value))
        else:
            target[name] = value


_MESSAGES = dict.fromkeys(('tuple_type', 'list_type', 'frozen_set_type'), 'must be a list, such as [a, b]')
"""Messages that replace those of pydantic, by type of the error. Operators write YAML, which has only lists."""


def _explain(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return '; '.join(_problem(item['loc'], _MESSAGES.get(item['type'], item['msg'])) for item in error.errors())
    return str(error)


def _problem(location: Sequence[int | str], message: str) -> str:
    """Describe a validation error; an error about several fields has no location."""
    message = message.removeprefix('Value error, ')
    return f'{".".join(map(str, location))}: {message}' if location else message
