"""The quick-start program for torchrun saves the same adapter with four processes as with one."""

from pathlib import Path

import pytest

from fixtures.seed_programs import RunProgram

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SIZES = 'fsdp_size=4, dp_size=2'
"""Sizes of the mesh in the program."""
EXAMPLES = {'range(1000)': 'range(40)'}
"""Replacement that reduces the number of examples."""


def test_torchrun_program_trains_the_adapter_of_one_process(run_program: RunProgram, tmp_path: Path) -> None:
    """Four processes, with two copies of the model in two shards each, save the same adapter as one process."""
    weights: list[bytes] = []
    for name, sizes, ranks in (('one', 'fsdp_size=1, dp_size=1', 1), ('four', 'fsdp_size=2, dp_size=2', 4)):
        folder = tmp_path / name
        folder.mkdir()
        run = run_program('english/torchrun_sft', folder=folder, replaced={SIZES: sizes, **EXAMPLES}, ranks=ranks)
        assert run.code == 0, run.out
        assert run.out.count('Total steps: 5') == 1, 'not exactly one process has logged'
        (saved,) = folder.rglob('last-checkpoint/adapter_model.safetensors')
        weights.append(saved.read_bytes())
    assert weights[0] == weights[1]
    assert all(f'rank {rank} ' in run.out for rank in range(4))
