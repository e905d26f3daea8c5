"""One program trains, saves, continues and samples with each of several older SDKs, in separate processes."""

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from fixtures.tinker_sdk import SDK_MARKS, older_sdk, run_program
from twinkle_client.stack import StackState

pytestmark = SDK_MARKS
PROGRAM = Path(__file__).with_name('older_program.py')


def weights_info(stack: StackState, path: str) -> dict[str, Any]:
    """Return the information that SDKs read before they resume saved weights."""
    headers = {'x-api-key': stack.read_api_key()}
    response = httpx.post(f'{stack.http_url}/api/v1/weights_info', json={'tinker_path': path}, headers=headers)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize('version', ['0.16.1', '0.20.0', '0.24.0', '0.36.0'])
@pytest.mark.slow
def test_program_of_an_older_sdk_finishes(stack: StackState, tmp_path: Path, version: str) -> None:
    """An older SDK trains, samples, and continues saved adapters, even of some layers, with bitwise equal losses."""
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
    attention = results['attention']
    assert attention['logprobs'][0] == attention['logprobs'][1] == attention['logprobs'][2]
    original, with_optimizer, without_optimizer = attention['losses']
    assert original == with_optimizer
    assert original[0] == without_optimizer[0]
    assert original[1] != without_optimizer[1]
    for path in attention['paths']:
        info = weights_info(stack, path)
        assert (info['train_attn'], info['train_mlp'], info['train_unembed']) == (True, False, False)
