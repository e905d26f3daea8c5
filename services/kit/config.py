"""Typed configuration: one frozen object a service, read once at the start.

Values come, the later winning, from the defaults, a YAML file (`--config`), the environment
(`TWINKLE_<SERVICE>_<FIELD>`, nested fields joined by `__`) and `--set field.sub=value`.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.kit.telemetry import TelemetryConfig


class LimitsConfig(BaseModel):
    """Bounds that keep one caller from harming the others."""

    model_config = ConfigDict(frozen=True, extra='forbid')

    message_bytes: int = Field(default=64 << 20, ge=1 << 10)
    """Most bytes of one message; larger ones are refused with their size named."""
    queue_length: int = Field(default=1024, ge=1)
    """Operations or requests one tenant may have waiting."""


class ServiceConfig(BaseModel):
    """What every service can be told."""

    model_config = ConfigDict(frozen=True, extra='forbid')
    service: ClassVar[str] = ''
    """Name of the service; set by each subclass."""

    listen: str = '127.0.0.1:0'
    """Address to serve on, `host:port`; port 0 picks a free one."""
    state_dir: Path = Path('.twinkle')
    """Folder for everything the service keeps."""
    address_file: Path | None = None
    """Where to write the address and process id once it serves. Unset: nowhere."""
    internal_token: str = Field(default='', repr=False)
    """Secret shared by the services. Empty: anyone is trusted, which is refused unless on loopback."""
    drain_seconds: float = Field(default=10.0, ge=0)
    """How long running calls may go on after a stop was asked for."""
    limits: LimitsConfig = LimitsConfig()
    telemetry: TelemetryConfig = TelemetryConfig()


_Config = TypeVar('_Config', bound=ServiceConfig)


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
        return config_class.model_validate(values)
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
        if name.startswith(prefix):
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
