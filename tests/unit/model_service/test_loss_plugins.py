"""Losses of other packages, only where the operator named them."""

import pytest

from services.model.backends.local.loading import LoadOptions, load_engine
from services.model.config import ModelConfig
from twinkle.component import UnknownComponent


def test_no_plugin_is_allowed_unless_it_is_named():
    """The default is none."""
    assert ModelConfig.model_fields['loss_plugins'].default == ()
    assert LoadOptions(base_model='any').loss_plugins == ()


def test_a_plugin_that_nobody_offers_stops_the_service_from_starting():
    """Before the model is loaded: the name in the configuration is wrong, or the package is missing."""
    with pytest.raises(UnknownComponent):
        load_engine(LoadOptions(base_model='none/such', loss_plugins=('no-package-offers-this',)))
