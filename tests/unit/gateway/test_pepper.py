"""The gateway's secret: as configured, else its own."""

from pathlib import Path

from services.gateway.config import GatewayConfig
from services.gateway.keys.pepper import pepper_of


def test_a_configured_pepper_is_used_as_it_is(tmp_path: Path) -> None:
    """Nothing is written then."""
    config = GatewayConfig(state_dir=tmp_path, key_pepper='ab' * 16)
    assert pepper_of(config) == b'\xab' * 16
    assert list(tmp_path.iterdir()) == []


def test_the_pepper_of_a_state_folder_stays(tmp_path: Path) -> None:
    """Whoever asks, after a restart too, gets the same; another folder has another."""
    first = pepper_of(GatewayConfig(state_dir=tmp_path / 'a'))
    assert pepper_of(GatewayConfig(state_dir=tmp_path / 'a')) == first != pepper_of(GatewayConfig(state_dir=tmp_path))
