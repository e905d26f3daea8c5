"""Each rank of a mesh reads its part of a batch."""

import pytest

from twinkle.dataloader import DataLoader
from twinkle.infra import DeviceMesh


def first_batch(mesh: DeviceMesh, rank: int | None, **options: str) -> list[int]:
    """Return a rank's part of the first batch of 0, 1, 2, ... in batches of 8."""
    return next(iter(DataLoader(range(16), batch_size=8, device_mesh=mesh, rank=rank, **options)))


def test_data_axes_share_a_batch_and_others_repeat_it() -> None:
    """Ranks on dp and fsdp axes read different parts, and tp ranks read the same part."""
    mesh = DeviceMesh.from_sizes(dp_size=2, fsdp_size=2, tp_size=2)
    parts = [first_batch(mesh, rank) for rank in range(8)]
    assert parts[::2] == parts[1::2] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_rank_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment variable `RANK` is the default rank."""
    monkeypatch.setenv('RANK', '1')
    assert first_batch(DeviceMesh.from_sizes(dp_size=2), None) == [4, 5, 6, 7]


def test_batches_for_other_processes_are_refused() -> None:
    """A process without a rank in the mesh, and an unknown group, are refused."""
    assert first_batch(DeviceMesh.from_sizes(dp_size=1), None, remote_group='default') == list(range(8))
    with pytest.raises(ValueError, match='the rank of this process is not known'):
        first_batch(DeviceMesh.from_sizes(dp_size=2), None, remote_group='default')
    with pytest.raises(ValueError, match='trainers'):
        first_batch(DeviceMesh.from_sizes(dp_size=1), None, remote_group='trainers')


def test_batches_that_cannot_be_divided_are_refused() -> None:
    """A batch size that ranks cannot share equally, a minimum below the rank count and an unknown rank are refused."""
    mesh = DeviceMesh.from_sizes(dp_size=3)
    for options in ({'batch_size': 4}, {'batch_size': 6, 'min_batch_size': 2}):
        with pytest.raises(ValueError, match='batch_size'):
            DataLoader(range(9), device_mesh=mesh, rank=0, **options)
    with pytest.raises(ValueError, match='rank 3'):
        DataLoader(range(9), batch_size=3, device_mesh=mesh, rank=3)


def test_last_batch_is_shared_or_dropped() -> None:
    """A last batch is read if every rank gets an example, and is dropped otherwise."""
    mesh = DeviceMesh.from_sizes(dp_size=2)
    sizes = {
        size: [
            [len(batch) for batch in DataLoader(range(size), batch_size=4, device_mesh=mesh, rank=rank)]
            for rank in (0, 1)
        ]
        for size in (7, 5)
    }
    assert sizes == {7: [[2, 1], [2, 2]], 5: [[2], [2]]}
