"""Unit tests of `DeviceMesh`: rank coordinates, batch slices and the ranks whose results are collected."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle import DeviceMesh

AXES = ('pp', 'dp', 'fsdp', 'cp', 'ulysses', 'tp')
sizes = st.fixed_dictionaries({f'{axis}_size': st.integers(1, 3) for axis in AXES})


@given(sizes)
def test_axes_and_ranks_are_one_to_one(axis_sizes: dict[str, int]) -> None:
    """Each rank has unique coordinates, and the last axis varies fastest."""
    mesh = DeviceMesh.from_sizes(**axis_sizes)
    coordinates = [tuple(mesh.axis_rank(axis, rank) for axis in AXES) for rank in range(mesh.world_size)]
    assert coordinates == sorted(set(coordinates))
    assert mesh.data_world_size == axis_sizes['dp_size'] * axis_sizes['fsdp_size']


@given(sizes, st.integers(0, 40))
def test_slices_are_the_batch_in_order(axis_sizes: dict[str, int], length: int) -> None:
    """The slices of all data ranks cover the batch exactly once, and their lengths differ by at most one."""
    mesh = DeviceMesh.from_sizes(**axis_sizes)
    parts = [list(range(length))[mesh.get_slice(length, rank)] for rank in range(mesh.data_world_size)]
    assert [row for part in parts for row in part] == list(range(length))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(sizes)
def test_results_are_collected_once_from_the_last_stage(axis_sizes: dict[str, int]) -> None:
    """Results are collected from one rank of the last pipeline stage per data rank, in data-rank order."""
    mesh = DeviceMesh.from_sizes(**axis_sizes)
    ranks = mesh.get_collect_ranks()
    assert [mesh.get_data_rank_from_global_rank(rank) for rank in ranks] == list(range(mesh.data_world_size))
    assert {mesh.axis_rank('pp', rank) for rank in ranks} == {axis_sizes['pp_size'] - 1}
    assert {mesh.axis_rank('tp', rank) for rank in ranks} == {0}


def test_worked_example_of_sixteen_ranks() -> None:
    """A mesh of 2 x 2 x 2 x 2 ranks has the groups of ranks that were computed by hand."""
    mesh = DeviceMesh.from_sizes(pp_size=2, dp_size=2, cp_size=2, tp_size=2)
    assert mesh.get_pp_last_ranks() == list(range(8, 16))
    assert mesh.get_collect_ranks() == [8, 12]
    assert mesh.get_dim_ranks('tp', 5) == [4, 5]
    assert mesh.get_dim_ranks('dp', 5) == [1, 5]
    assert mesh.get_dim_ranks('pp', 5) == [5, 13]
    assert mesh.get_dim_ranks('fsdp', 5) == [5]


def test_expert_axes_divide_the_ranks_of_a_stage() -> None:
    """The ranks of a stage form groups along `ep`, `ep_fsdp` and `etp`; sizes that do not divide them are refused."""
    mesh = DeviceMesh.from_sizes(pp_size=2, dp_size=8, ep_size=4, ep_fsdp_size=2)
    assert [mesh.axis_rank('ep', rank) for rank in range(16)] == [0, 1, 2, 3] * 4
    assert [mesh.axis_rank('ep_fsdp', rank) for rank in range(8)] == [0] * 4 + [1] * 4
    assert (mesh.ep_world_size, mesh.etp_world_size, mesh.world_size) == (4, 1, 16)
    assert mesh.get_dim_ranks('ep', 9) == [8, 9, 10, 11]
    assert mesh.get_dim_ranks('ep_fsdp', 9) == [9, 13]
    assert mesh.get_dim_ranks('etp', 9) == [9]
    copied = DeviceMesh.from_sizes(dp_size=8, ep_size=2, etp_size=2)
    assert copied.get_dim_ranks('ep', 5) == [5, 7]
    assert copied.get_dim_ranks('etp', 5) == [4, 5]
    with pytest.raises(ValueError, match='ep_size 3'):
        DeviceMesh.from_sizes(dp_size=8, ep_size=3)


def test_this_process_has_the_rank_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Properties of a rank read `RANK`; if a mesh has several ranks, an unset or invalid `RANK` raises ValueError."""
    mesh = DeviceMesh.from_sizes(dp_size=2, tp_size=2)
    monkeypatch.delenv('RANK', raising=False)
    with pytest.raises(ValueError, match='rank'):
        assert mesh.dp_rank
    assert DeviceMesh.from_sizes(tp_size=1).tp_rank == 0
    monkeypatch.setenv('RANK', '3')
    assert (mesh.dp_rank, mesh.tp_rank, mesh.pp_rank, mesh.data_rank) == (1, 1, 0, 1)
    assert mesh.get_slice(8) == slice(4, 8)
    monkeypatch.setenv('RANK', '4')
    with pytest.raises(ValueError, match='rank 4'):
        assert mesh.dp_rank


def test_a_mesh_can_be_built_from_nested_lists() -> None:
    """Nested lists with axis names form a mesh, and invalid ranks, axes and sizes raise ValueError."""
    mesh = DeviceMesh([[4, 5], [6, 7]], ('dp', 'tp'), vpp_size=2, sequence_parallel=True)
    assert (mesh.world_size, mesh.axis_rank('dp', 6), mesh.dp_world_size) == (4, 1, 2)
    for invalid_ranks, names in (([0, 0], ('dp',)), ([0, 1], ('dp', 'tp')), ([0, 1], ('rows',)), ([-1, 0], ('dp',))):
        with pytest.raises(ValueError, match='mesh'):
            DeviceMesh(invalid_ranks, names)
    with pytest.raises(ValueError, match='expert_sizes'):
        DeviceMesh([0, 1], ('dp',), expert_sizes=(('dp', 2),))
    with pytest.raises(ValueError, match='vpp_size'):
        DeviceMesh([0, 1], ('dp',), vpp_size=0)
    for method in (mesh.axis_size, mesh.axis_rank, mesh.get_dim_ranks):
        with pytest.raises(ValueError, match='experts'):
            method('experts')
    with pytest.raises(ValueError, match='stage'):
        mesh.get_pp_stage_ranks(1)
    with pytest.raises(ValueError, match='rank'):
        mesh.get_slice(8, 2)
