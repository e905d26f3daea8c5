"""The programs `twinkle-gateway`, `twinkle-model`, `twinkle-sampler`, `twinkle-data` and `twinkle-checkpoint`."""

import importlib

from twinkle.installation import install_command


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
        message = f'twinkle-{service}: the package {error.name} is missing: {install_command(service)}'
        raise SystemExit(message) from error
    main()
