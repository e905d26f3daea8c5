"""The programs `twinkle-gateway`, `twinkle-model`, `twinkle-sampler`, `twinkle-data` and `twinkle-checkpoint`."""

import importlib
import sys


def gateway() -> None:
    _run('gateway')


def model() -> None:
    _run('model')


def sampler() -> None:
    _run('sampler')


def data() -> None:
    _run('data')


def checkpoint() -> None:
    _run('checkpoint')


def _run(service: str) -> None:
    """Run a service, and name the extra to install if one of its libraries is missing."""
    try:
        main = importlib.import_module(f'twinkle_services.{service}.__main__').main
    except ModuleNotFoundError as error:
        if (error.name or '').startswith('twinkle'):
            raise
        raise SystemExit(missing_package(service, error.name or '')) from error
    main()


def missing_package(service: str, package: str, version: tuple[int, int] = sys.version_info[:2]) -> str:
    """Return the message of a program whose package is not installed, for a version of Python."""
    message = f"twinkle-{service}: the package {package} is missing: pip install 'twinkle-grpc[{service}]'"
    if service in ('model', 'sampler') and version > (3, 13):
        return f'{message} (tested with Python 3.11 to 3.13; this is {version[0]}.{version[1]})'
    return message
