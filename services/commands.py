"""The programs `twinkle-gateway`, `twinkle-model`, `twinkle-sampler`, `twinkle-data` and `twinkle-checkpoint`."""

import importlib


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
        raise SystemExit(
            f"twinkle-{service}: the package {error.name} is missing: pip install 'twinkle-grpc[{service}]'"
        ) from error
    main()
