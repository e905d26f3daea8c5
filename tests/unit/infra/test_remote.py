"""Unit tests of `remote_group`: a group of one rank runs in this process, and larger groups are refused."""

import logging
from collections.abc import Iterator

import pytest

import twinkle
from twinkle.infra import DeviceGroup, DeviceMesh, NotSupportedYet, place_here, remote_class, remote_function


@pytest.fixture(autouse=True)
def _groups() -> Iterator[None]:
    twinkle.initialize(groups=[DeviceGroup('one', ranks=1), DeviceGroup('many', ranks=[0, 1], device_type='GPU')])
    yield
    twinkle.initialize()


@remote_class(execute='first')
class Part:
    """A component whose constructor does not declare `device_mesh`."""

    def __init__(self, size: int = 1) -> None:
        self.size = size

    @remote_function(dispatch='slice_dp', collect='mean', lazy_collect=True)
    def doubled(self, values: list[int]) -> list[int]:
        """Return twice each value."""
        return [2 * self.size * value for value in values]


class SubPart(Part):
    """A subclass of a decorated component."""


@remote_class()
class Placed:
    """A component whose constructor declares `device` and `device_mesh`."""

    def __init__(self, device: str | None = None, device_mesh: DeviceMesh | None = None) -> None:
        self.device, self.device_mesh = device, device_mesh


@pytest.mark.parametrize('group', ['one', 'default'])
@pytest.mark.parametrize('kind', [Part, SubPart])
def test_a_group_of_one_rank_is_this_process(kind: type, group: str, caplog: pytest.LogCaptureFixture) -> None:
    """A component with a one-rank group works in this process, and one log line reports it."""
    with caplog.at_level(logging.INFO, logger='twinkle'):
        part = kind(size=3, remote_group=group, device_mesh=DeviceMesh.from_sizes(dp_size=1))
    assert part.doubled([1, 2]) == [6, 12]
    assert [(record.args, record.levelno) for record in caplog.records] == [((kind.__name__, group), logging.INFO)]


def test_other_groups_are_refused() -> None:
    """Groups and meshes of several ranks raise NotSupportedYet, and an undeclared group raises ValueError."""
    with pytest.raises(NotSupportedYet, match='many'):
        Part(remote_group='many')
    with pytest.raises(ValueError, match='other'):
        Part(remote_group='other')
    with pytest.raises(NotSupportedYet):
        Part(device_mesh=DeviceMesh.from_sizes(dp_size=2))
    assert place_here('Part', None) is None


def test_a_component_uses_the_device_of_its_group() -> None:
    """The group's device type is the default of `device`, and unsupported device types are refused."""
    twinkle.initialize(groups=[DeviceGroup('host', 1, 'cpu'), DeviceGroup('apple', 1, 'mps')])
    mesh = DeviceMesh.from_sizes(tp_size=1)
    placed = Placed(remote_group='host', device_mesh=mesh)
    assert (placed.device, placed.device_mesh) == ('cpu', mesh)
    assert Placed(remote_group='host', device='meta').device == 'meta'
    assert Placed(remote_group='default').device is None
    with pytest.raises(NotSupportedYet, match='mps'):
        Placed(remote_group='apple')


def test_unknown_option_values_are_refused() -> None:
    """Decorators, groups and `initialize` raise ValueError for unknown values."""
    for make in (
        lambda: remote_class(execute='some'),
        lambda: remote_function(dispatch='rows'),
        lambda: remote_function(collect='median'),
        lambda: DeviceGroup('g', ranks=0),
        lambda: DeviceGroup('g', ranks=[1, 1]),
        lambda: DeviceGroup('g', ranks=1, device_type='abacus'),
        lambda: twinkle.initialize(groups=[DeviceGroup('g', 1), DeviceGroup('g', 1)]),
    ):
        with pytest.raises(ValueError, match=r'must|group'):
            make()


def test_the_placement_report_lists_the_groups() -> None:
    """The placement report names the groups, and all of its lines have the same length."""
    report = twinkle.get_device_placement()
    assert len({len(line) for line in report.strip().splitlines()}) == 1
    assert [word for word in ('one', 'many') if word in report] == ['one', 'many']
