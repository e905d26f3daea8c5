"""Tests of losses from installed packages. A package must be allowed before its losses are imported.

Legend: R is the number of labels.
"""

import sys

import pytest

from twinkle.component import ComponentRegistry, InvalidComponent, UnknownComponent
from twinkle.data_format import LossOutput
from twinkle.loss import PLUGIN_GROUP, CrossEntropyLoss, Loss

MODULE = """
from twinkle.data_format import LossOutput
from twinkle.loss import Loss

class Doubled(Loss):
    def __init__(self, factor: float = 2.0) -> None:
        self.factor = factor

    def __call__(self, batch):
        return LossOutput(loss=self.factor * batch.logps_R.sum(), num_tokens=0)

class NoLoss:
    pass
"""


def registry():
    """Return a registry like `LOSSES` with one loss."""
    return ComponentRegistry('loss', Loss, (CrossEntropyLoss,), plugin_group=PLUGIN_GROUP)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Module name of an installed package that provides losses."""
    name = 'offered_losses_for_a_test'
    (tmp_path / f'{name}.py').write_text(MODULE)
    information = tmp_path / f'{name}-1.0.dist-info'
    information.mkdir()
    (information / 'METADATA').write_text(f'Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n')
    points = [f'doubled = {name}:Doubled', f'nothing = {name}:NoLoss', f'CrossEntropyLoss = {name}:Doubled']
    (information / 'entry_points.txt').write_text('\n'.join([f'[{PLUGIN_GROUP}]', *points]))
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)


def test_plugins_are_not_imported_before_they_are_allowed(package):
    """Losses of a package are neither imported nor available until the package is allowed."""
    losses = registry()
    losses.load_plugins([])
    assert losses.names == ('CrossEntropyLoss',)
    with pytest.raises(UnknownComponent):
        losses.build('doubled', {})
    assert package not in sys.modules


def test_an_allowed_loss_is_built_by_its_name(package):
    """An allowed plugin loss is built by its name; allowing the plugin again has no effect."""
    losses = registry()
    losses.load_plugins(['doubled'])
    losses.load_plugins(['doubled'])
    built = losses.build('doubled', {'factor': 3.0})
    assert (built.factor, losses.name_of(built), losses.names) == (3.0, 'doubled', ('CrossEntropyLoss', 'doubled'))
    assert package in sys.modules


@pytest.mark.usefixtures('package')
def test_invalid_plugins_are_refused():
    """A plugin that is not a loss, or whose name is already used, is refused."""
    losses = registry()
    for name in ('nothing', 'CrossEntropyLoss'):
        with pytest.raises(InvalidComponent):
            losses.load_plugins([name])
    assert losses.build('CrossEntropyLoss', {}).__class__ is CrossEntropyLoss
    with pytest.raises(UnknownComponent) as unknown:
        losses.load_plugins(['tripled'])
    assert unknown.value.known == ('CrossEntropyLoss', 'doubled', 'nothing')


def test_a_class_of_this_process_registers_itself():
    """A class can be registered under its name and an alias; a name in use and the base class are refused."""
    losses = registry()

    @losses.register()
    class CustomLoss(Loss):
        def __call__(self, batch):
            return LossOutput(loss=batch.logps_R.sum(), num_tokens=0)

    losses.register('alias')(CustomLoss)
    assert isinstance(losses.build('CustomLoss', {}), CustomLoss)
    assert isinstance(losses.build('alias', {}), CustomLoss)
    with pytest.raises(InvalidComponent):
        losses.register('CrossEntropyLoss')(CustomLoss)
    with pytest.raises(InvalidComponent):
        losses.register()(Loss)
