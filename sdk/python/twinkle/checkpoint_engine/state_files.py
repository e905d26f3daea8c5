"""The files of a folder that a state is kept in: peft's two for an adapter, one for a model's own weights."""

from twinkle.checkpoint_engine.manifest import WeightManifest
from twinkle.checkpoint_engine.peft_config import adapter_config_json
from twinkle.checkpoint_engine.peft_folder import ADAPTER_CONFIG_FILE, ADAPTER_MODEL_FILE, seed_metadata
from twinkle.checkpoint_engine.safetensors_file import build_header

MODEL_FILE = 'model.safetensors'
"""A model's own weights, where there is no adapter."""
WEIGHTS_FILES = (ADAPTER_MODEL_FILE, MODEL_FILE)
"""Where weights can lie; a folder has one of these."""


def weights_file(manifest: WeightManifest) -> str:
    """Return the name of the file for a state's weights."""
    return MODEL_FILE if manifest.lora_config is None else ADAPTER_MODEL_FILE


def weights_header(manifest: WeightManifest) -> bytes:
    """Return what stands before the weights in their file; their bytes follow as they lie in the state."""
    metadata = None if manifest.lora_config is None else seed_metadata(manifest.lora_config)
    return build_header(manifest.entries_of(manifest.weights_section), metadata=metadata)


def description_files(manifest: WeightManifest) -> dict[str, bytes]:
    """Return the contents, by name, of the files beside the weights that say what they are."""
    if manifest.lora_config is None:
        return {}
    names = [entry.name for entry in manifest.entries_of(manifest.weights_section)]
    config = adapter_config_json(manifest.lora_config, base_model=manifest.base_model, tensor_names=names)
    return {ADAPTER_CONFIG_FILE: config}
