"""Losses of other packages are available only if the operator allows the packages."""

from pathlib import Path

import pytest

from twinkle.component import UnknownComponent
from twinkle.plugin import PluginRefused, allowed_plugins, keep_plugins_out
from twinkle_services.model.backends.group.loading import LoadOptions, load_engine
from twinkle_services.model.config import ModelConfig


def test_no_plugin_is_allowed_by_default():
    """No plugin is allowed by default."""
    assert ModelConfig.model_fields['loss_plugins'].default == ()
    assert LoadOptions(base_model='any').loss_plugins == ()


def test_missing_plugin_stops_the_start():
    """A configured plugin that is not installed stops the service before the model is loaded."""
    with pytest.raises(UnknownComponent):
        load_engine(LoadOptions(base_model='none/such', loss_plugins=('no-package-offers-this',)))


def test_plugin_with_another_digest_stops_the_start(tmp_path: Path):
    """A plugin whose digest differs from the configured one stops the service."""
    ran = tmp_path / 'ran'
    (tmp_path / 'loss').mkdir()
    (tmp_path / 'loss' / '__init__.py').write_text(f"open({str(ran)!r}, 'w').close()\n")
    options = LoadOptions(base_model='none/such', loss_plugins=(f'{tmp_path}/loss@000000000000',))
    with allowed_plugins():
        keep_plugins_out()
        with pytest.raises(PluginRefused):
            load_engine(options)
    assert not ran.exists()
