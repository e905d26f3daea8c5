"""Programs of the how-to pages, which need a running stack, on a tiny model."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs.site.calls import ExampleCalls, methods_of
from docs.site.contracts import read_contracts
from twinkle_client import TwinkleClient
from twinkle_client.rollouts import RunRollouts
from twinkle_client.stack import StackState

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / 'docs' / 'do'
DOCUMENTED_MODEL = "MODEL = 'smollm2-135m-instruct'"
BLOCK = re.compile(r'^```python\n(.*?)^```', re.MULTILINE | re.DOTALL)
FILE = re.compile(r'^```text title="([\w.]+)"\n(.*?)^```', re.MULTILINE | re.DOTALL)
"""A file that the page shows with its name."""


def program_of(page: str, folder: Path, model: str) -> str:
    """Return the Python blocks of a page as one program for another model, and write the files that it shows."""
    text = (PAGES / page).read_text(encoding='utf-8')
    for name, content in FILE.findall(text):
        (folder / name).write_text(content)
    program = '\n'.join(BLOCK.findall(text))
    return program.replace(DOCUMENTED_MODEL, f'MODEL = {model!r}')


def run_program(program: str, folder: Path, stack: StackState, api_key: str) -> list[str]:
    """Run a program in a folder, and return the lines that it prints."""
    script = folder / 'program.py'
    script.write_text(program)
    environment = {**os.environ, 'TWINKLE_SERVER_URL': stack.address, 'TWINKLE_API_KEY': api_key}
    environment['PYTHONPATH'] = os.pathsep.join([str(ROOT / 'sdk' / 'python'), str(ROOT)])
    command = [sys.executable, str(script)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def run(page: str, folder: Path, stack: StackState, api_key: str) -> list[str]:
    """Run the program of a page in a folder, and return the lines that it prints."""
    return run_program(program_of(page, folder, stack.base_model), folder, stack, api_key)


def test_a_csv_file_is_learned_and_downloaded(tiny_stack: StackState, tenant_key: str, tmp_path: Path) -> None:
    """The loss of the questions falls, and the downloaded folder is a peft adapter."""
    lines = run('own-data.md', tmp_path, tiny_stack, tenant_key)
    losses = [float(line.split()[1]) for line in lines[:10]]
    assert losses[-1] < 0.9 * losses[0]
    assert (tmp_path / 'shop-adapter' / 'adapter_model.safetensors').stat().st_size > 0


def test_validation_losses_are_stored_with_the_run(tiny_stack: StackState, tenant_key: str, tmp_path: Path) -> None:
    """The program measures every third step, and its best checkpoint exists."""
    *printed, last = run('validation.md', tmp_path, tiny_stack, tenant_key)
    assert [int(line.split()[0]) for line in printed] == [3, 6, 9, 12]
    steps, _, path = last.rpartition('] ')
    assert steps == '[3, 6, 9, 12'
    with TwinkleClient(tiny_stack.address, tenant_key) as client:
        assert path in {checkpoint.path for checkpoint in client.list_checkpoints()}


def test_grpo_over_the_services_runs_every_step(tiny_stack: StackState, tenant_key: str, tmp_path: Path) -> None:
    """Each step prints the mean reward of its samples, which is a share, and stores the samples with their rewards."""
    lines = run('grpo-services.md', tmp_path, tiny_stack, tenant_key)
    assert [int(line.split()[0]) for line in lines] == [0, 1, 2, 3]
    assert all(0 <= float(line.split()[1]) <= 1 for line in lines)
    with TwinkleClient(tiny_stack.address, tenant_key) as client:
        groups = RunRollouts(client.list_training_runs()[0].run_id, client=client).list()
    assert [group.step for group in groups] == [3, 3, 2, 2, 1, 1, 0, 0]
    for step, line in enumerate(lines):
        rewards = [item.reward for group in groups if group.step == step for item in group.rollouts]
        assert round(sum(rewards) / len(rewards), 3) == float(line.split()[1])


def test_the_connection_program_lists_services_and_models(
    tiny_stack: StackState, tenant_key: str, tmp_path: Path
) -> None:
    """All services respond, and the tiny model can be trained."""
    *services, models = run('remote-server.md', tmp_path, tiny_stack, tenant_key)
    assert {line.split()[0] for line in services} == {'gateway', 'model', 'sampler', 'data', 'checkpoint'}
    assert {line.split(maxsplit=1)[1] for line in services} == {'ok'}
    assert models == f"['{tiny_stack.base_model}']"


@pytest.mark.parametrize(
    ('method', 'printed'),
    [
        ('ServerService.GetServerInfo', 'service: "gateway"'),
        ('AdapterService.ListAdapters', ''),
        ('SamplerService.Sample', 'finished {'),
    ],
)
def test_a_python_example_of_the_reference_runs(
    tiny_stack: StackState, tenant_key: str, tmp_path: Path, method: str, printed: str
) -> None:
    """The program that the reference page shows for a method succeeds, and prints the response."""
    contracts = read_contracts(ROOT / 'protos')
    (found,) = [item for item in methods_of(contracts) if f'{item[1]}.{item[2].name}' == method]
    program = ExampleCalls(contracts).python(*found).replace('smollm2-135m-instruct', tiny_stack.base_model)
    lines = run_program(program, tmp_path, tiny_stack, tenant_key)
    assert any(printed in line for line in lines)


def test_each_page_of_a_program_names_the_built_in_model() -> None:
    """A page that uses a model defines it in the line that this test replaces."""
    programs = {path.name: '\n'.join(BLOCK.findall(path.read_text())) for path in PAGES.glob('*.md')}
    assert [page for page, text in programs.items() if 'MODEL' in text and DOCUMENTED_MODEL not in text] == []
