"""The Tinker SDK's own client, as programs of the quick start ask for it. The gateway speaks its API unpatched."""

import importlib
from typing import TYPE_CHECKING, Any

from twinkle.component import MissingLibrary
from twinkle_client.endpoint import find_http_endpoint

if TYPE_CHECKING:
    import tinker


def init_tinker_compat_client(
    base_url: str | None = None, api_key: str | None = None, **options: Any
) -> 'tinker.ServiceClient':
    """Return a client of the Tinker SDK for a gateway.

    Args:
        base_url: where the gateway speaks HTTP (its `http_listen`). Unset: the local stack's.
        api_key: begins with 'tml-', as Twinkle's keys do. Unset or empty: `TWINKLE_API_KEY`, else the local stack's own
            key, for its own address.
        options: of `tinker.ServiceClient`.

    Raises:
        ValueError: no address was given or found.
        MissingLibrary: the Tinker SDK is not installed.
    """
    sdk = _sdk()
    endpoint = find_http_endpoint(base_url, api_key)
    return sdk.ServiceClient(base_url=endpoint.address, api_key=endpoint.api_key or None, **options)


def init_tinker_client() -> None:
    """Check that the Tinker SDK is there: it needs no patches to work with the gateway.

    Raises:
        MissingLibrary: it is not installed.
    """
    _sdk()


def _sdk() -> Any:
    # It takes seconds to load, and only these programs need it.
    try:
        return importlib.import_module('tinker')
    except ImportError as error:
        raise MissingLibrary('tinker', 'tinker') from error
