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
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts['version'] == version
    assert stack.base_model in facts['models']
    assert facts['losses'][-1] < facts['losses'][0]
    assert facts['policy loss'] == pytest.approx(-2.5, abs=1e-3)
    assert facts['custom loss']['loss:sum'] > 0
    assert facts['lora rank'] == 8
    assert facts['path'].endswith('/weights/state')
    assert facts['goes on'][0] == facts['goes on'][1]
    np.testing.assert_allclose(facts['sampler'][1:], facts['trainer'], atol=1e-4)
    assert facts['samples'][0] == facts['samples'][1] == facts['named']
    assert facts['samples'][0][0] != facts['samples'][0][1]
