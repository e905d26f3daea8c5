"""The TypeScript package and its example, against the shared stack. `./run console` builds the package."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from fixtures.example_programs import check_features, features_in
from fixtures.source_tree import ROOT
from twinkle_client.stack import StackState

pytestmark = pytest.mark.timeout(300)
PACKAGE = ROOT / 'sdk' / 'typescript'
EXAMPLE = ROOT / 'examples' / 'typescript'
MODULES = ROOT / 'node_modules'


@pytest.fixture
def variables(tiny_stack: StackState, tenant_key: str) -> Mapping[str, str]:
    """Environment of programs: the addresses of the stack, and the key of a new tenant."""
    return {
        **os.environ,
        'TWINKLE_API_KEY': tenant_key,
        'TWINKLE_HTTP_URL': f'http://{tiny_stack.http_address}',
        'TWINKLE_MODEL': tiny_stack.base_model,
        'TWINKLE_SERVER_URL': tiny_stack.address,
    }


def run_node(folder: Path, variables: Mapping[str, str], *arguments: str) -> str:
    """Run a program of Node.js, which must succeed, and return its output."""
    done = subprocess.run(
        ['node', *arguments], cwd=folder, env=dict(variables), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_package_calls_a_stack(variables: Mapping[str, str]) -> None:
    """Calls, streams, numbered operations, lost connections, errors, deadlines and cancellation work from Node.js."""
    assert (PACKAGE / 'dist').exists(), 'the package is not built; run ./run console'
    vitest = str(MODULES / 'vitest' / 'vitest.mjs')
    output = run_node(PACKAGE, variables, vitest, 'run', '--config', 'vitest.stack.config.ts', '--reporter', 'verbose')
    assert output.count('✓') > 10


def test_example_trains_and_samples(variables: Mapping[str, str], tiny_stack: StackState, tmp_path: Path) -> None:
    """The example compiles, and prints what the programs in other languages print."""
    run_node(EXAMPLE, variables, str(MODULES / 'typescript' / 'bin' / 'tsc'), '--outDir', str(tmp_path))
    (tmp_path / 'node_modules').symlink_to(MODULES)
    (tmp_path / 'package.json').write_text('{"type": "module"}')
    check_features(features_in(run_node(tmp_path, variables, 'program.js')), tiny_stack.base_model)
