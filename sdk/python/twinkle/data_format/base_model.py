"""Aliases of the built-in base models, which stand for the ids of their repositories on a hub."""

from collections.abc import Mapping
from types import MappingProxyType

BASE_MODEL_ALIASES: Mapping[str, str] = MappingProxyType(
    {'smollm2-135m-instruct': 'HuggingFaceTB/SmolLM2-135M-Instruct'}
)
"""Hub ids of the built-in models by alias."""


def base_model_id(name: str) -> str:
    """Return the hub id for which `name` is an alias. A name that is not an alias is returned unchanged.

    Services and clients use the result wherever they name, compare or store a base model.
    """
    return BASE_MODEL_ALIASES.get(name, name)
