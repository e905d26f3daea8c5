"""Creation of Tinker SDK clients. The gateway serves Tinker's API, so the SDK needs no patches."""

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
        base_url: HTTP address of the gateway (its `http_listen`). Unset: the local stack.
        api_key: API key of Twinkle, which begins with 'tml-'. Unset or empty: `TWINKLE_API_KEY`, or the local
            stack's key if `base_url` is the local stack.
        options: Arguments of `tinker.ServiceClient`.

    Raises:
        ValueError: No address was given or found.
        MissingLibrary: The Tinker SDK is not installed.
    """
    sdk = _sdk()
    endpoint = find_http_endpoint(base_url, api_key)
    return sdk.ServiceClient(base_url=endpoint.address, api_key=endpoint.api_key or None, **options)


def init_tinker_client() -> None:
    """Check that the Tinker SDK is installed. The SDK works with the gateway without patches.

    Raises:
        MissingLibrary: The Tinker SDK is not installed.
    """
    _sdk()


def _sdk() -> Any:
    # The import takes seconds, and only programs that use the Tinker SDK need it.
    try:
        return importlib.import_module('tinker')
    except ImportError as error:
        raise MissingLibrary('tinker', 'tinker') from error
