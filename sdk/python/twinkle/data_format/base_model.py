"""Names of base models: aliases of the built-in ones, and ids with or without the prefix of a hub."""

from collections.abc import Collection, Mapping
from types import MappingProxyType

BASE_MODEL_ALIASES: Mapping[str, str] = MappingProxyType(
    {'smollm2-135m-instruct': 'HuggingFaceTB/SmolLM2-135M-Instruct'}
)
"""Hub ids of the built-in models by alias."""
_HUBS = ('ms://', 'hf://')


def base_model_id(name: str) -> str:
    """Return the hub id for which `name` is an alias. A name that is not an alias is returned unchanged.

    Services and clients use the result wherever they name, compare or store a base model.
    """
    return BASE_MODEL_ALIASES.get(name, name)


def listed_base_model(name: str, listed: Collection[str]) -> str | None:
    """Return the base model in a list that `name` refers to; None if no model or several models match.

    An equal id, or the id of the alias `name`, takes precedence. Otherwise a model matches if the two ids differ only
    in a hub prefix of one of them. Services compare the base models of requests with those of their configuration by
    this function, and continue with the listed id.
    """
    name = base_model_id(name)
    if name in listed:
        return name
    hub, plain = _split_hub(name)
    matches = [item for item in listed if _split_hub(item)[1] == plain and '' in (hub, _split_hub(item)[0])]
    return matches[0] if len(matches) == 1 else None


def _split_hub(name: str) -> tuple[str, str]:
    """Return the hub prefix of a model id, empty if it has no prefix, and the rest."""
    hub = next((prefix for prefix in _HUBS if name.startswith(prefix)), '')
    return hub, name.removeprefix(hub)
