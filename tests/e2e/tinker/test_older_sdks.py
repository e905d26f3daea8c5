"""Unmodified programs of older SDKs, each in a separate process, train, save, continue and sample."""

import json
from pathlib import Path

import numpy as np
import pytest

from fixtures.tinker_sdk import SDK_MARKS, older_sdk, run_program
from twinkle_client.stack import StackState

pytestmark = SDK_MARKS
PROGRAM = Path(__file__).with_name('older_program.py')


@pytest.mark.parametrize('version', ['0.16.1', '0.24.0'])
def test_program_of_an_older_sdk_finishes(stack: StackState, tmp_path: Path, version: str) -> None:
    """An older SDK learns, continues bitwise from its saved state, and samples trained weights."""
    done = run_program([str(PROGRAM), stack.base_model], stack, tmp_path, sdk=older_sdk(version))
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    assert results['version'] == version
    assert stack.base_model in results['models']
    assert results['losses'][-1] < results['losses'][0]
    assert results['policy loss'] == pytest.approx(-2.5, abs=1e-3)
    assert results['custom loss']['loss:sum'] > 0
    assert results['lora rank'] == 8
    assert results['path'].endswith('/weights/state')
    assert results['continued'][0] == results['continued'][1]
    np.testing.assert_allclose(results['sampler'][1:], results['trainer'], atol=1e-4)
    assert results['samples'][0] == results['samples'][1] == results['named']
    assert results['samples'][0][0] != results['samples'][0][1]
