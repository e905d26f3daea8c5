"""The secret that hashes, seals and links are made with."""

from services.gateway.config import GatewayConfig
from services.gateway.keys.hasher import load_pepper


def pepper_of(config: GatewayConfig) -> bytes:
    """Return the pepper that was configured, else the one of the state folder, made at the first call."""
    return bytes.fromhex(config.key_pepper) or load_pepper(config.pepper_file())
