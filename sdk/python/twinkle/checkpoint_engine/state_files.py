"""The files that store a state in a folder: PEFT's two files for an adapter, one file for the weights of a model."""

from collections.abc import Mapping

from twinkle.checkpoint_engine.manifest import WeightManifest
from twinkle.checkpoint_engine.model_card import adapter_card
from twinkle.checkpoint_engine.peft_config import adapter_config_json
from twinkle.checkpoint_engine.peft_folder import ADAPTER_CONFIG_FILE, ADAPTER_MODEL_FILE, seed_metadata
from twinkle.checkpoint_engine.safetensors_file import build_header
from twinkle.hub import CARD_FILE, public_name

MODEL_FILE = 'model.safetensors'
"""Name of the file with the weights of a model."""
WEIGHTS_FILES = (ADAPTER_MODEL_FILE, MODEL_FILE)
"""Possible names of the weights file. A folder has a single weights file."""


def weights_file(manifest: WeightManifest) -> str:
    """Return the name of the weights file of a state."""
    return MODEL_FILE if manifest.lora_config is None else ADAPTER_MODEL_FILE


def weights_header(manifest: WeightManifest) -> bytes:
    """Return the header of the weights file. The bytes of the weights section follow it unchanged."""
    metadata = None if manifest.lora_config is None else seed_metadata(manifest.lora_config)
    return build_header(manifest.entries_of(manifest.weights_section), metadata=metadata)


def description_files(manifest: WeightManifest) -> dict[str, bytes]:
    """Return the contents of the files beside the weights file, by name.

    The configuration names the base model's repository or, for a folder without one, only the name of the folder.
    """
    if manifest.lora_config is None:
        return {}
    names = [entry.name for entry in manifest.entries_of(manifest.weights_section)]
    config = adapter_config_json(manifest.lora_config, base_model=public_name(manifest.base_model), tensor_names=names)
    return {ADAPTER_CONFIG_FILE: config}


def shared_files(manifest: WeightManifest, *, title: str, facts: Mapping[str, str]) -> dict[str, bytes]:
    """Return the files beside the weights file in a folder for other tools: `description_files` and a model card.

    Args:
        manifest: manifest of the state.
        title: heading of the card.
        facts: rows of the card's table.
    """
    if manifest.lora_config is None:
        return description_files(manifest)
    card = adapter_card(manifest.lora_config, title=title, base_model=manifest.base_model, facts=facts)
    return {CARD_FILE: card, **description_files(manifest)}
