"""Quick-start programs that need Megatron or pipeline stages fail with a `NotSupportedYet` error."""

import pytest

from fixtures.seed_programs import PROGRAMS, RunProgram

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
_NOT_YET = 'twinkle.infra.errors.NotSupportedYet: '
_SIZES = {'MODEL_GPUS': '1', 'SAMPLER_GPUS': '1'}


@pytest.mark.parametrize('language', ['english', 'chinese'])
def test_program_with_megatron_is_refused(language: str, run_program: RunProgram) -> None:
    """The program for Megatron exits with status 1 and a `NotSupportedYet` error."""
    run = run_program(f'{language}/ray_grpo', replaced={"device_type='GPU'": "device_type='CPU'"}, **_SIZES)
    assert run.code == 1
    assert run.last_line.startswith(_NOT_YET), run.out


@pytest.mark.parametrize('model', ['TransformersModel', 'MegatronModel'])
def test_mesh_of_pipeline_stages_is_refused(model: str, run_program: RunProgram) -> None:
    """A program that constructs a trainer on a mesh of pipeline and tensor ranks exits with `NotSupportedYet`."""
    groups = (PROGRAMS / 'english' / 'device_groups.txt').read_text().rpartition('twinkle.initialize(')[0]
    lines = (PROGRAMS / 'english' / 'remote_groups.txt').read_text().splitlines()
    (construct,) = [line for line in lines if line.startswith(f'model = {model}(')]
    imports = '\n'.join(line for line in lines if line.startswith('from'))
    groups = groups.replace("device_type='cuda'", "device_type='cpu'")
    initialize = "twinkle.initialize(mode='ray', nproc_per_node=8, groups=device_group)"
    program = f'{groups}\n{initialize}\n{imports}\n{construct}\n'
    run = run_program('english/remote_groups', replaced={'\n'.join(lines): program})
    assert run.code == 1
    assert run.last_line.startswith(_NOT_YET), run.out
