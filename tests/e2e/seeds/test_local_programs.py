"""The quick start's programs that need no services run as they are written."""

import numpy as np
import pytest
from safetensors.numpy import load_file

from fixtures.seed_programs import RunProgram

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
DIALECTS = ('english', 'chinese')


@pytest.mark.parametrize('dialect', DIALECTS)
def test_packing_program_prints_a_batch(dialect: str, run_program: RunProgram) -> None:
    """Datasets and loaders are of use without the rest."""
    run = run_program(f'{dialect}/dataset_only')
    assert run.code == 0, run.out
    assert all(repr(column) in run.out for column in ('input_ids', 'position_ids', 'labels'))


@pytest.mark.parametrize('dialect', DIALECTS)
def test_single_device_program_trains_its_adapter(dialect: str, run_program: RunProgram) -> None:
    """A whole pass is trained, and the adapter is saved where it is said to be."""
    run = run_program(f'{dialect}/single_device_sft')
    assert run.code == 0, run.out
    (saved,) = run.folder.rglob('last-checkpoint/adapter_model.safetensors')
    weights = load_file(saved)
    # These begin as zeros.
    learned = [array for name, array in weights.items() if 'lora_B' in name]
    assert learned
    assert all(np.any(array != 0) for array in learned)
