"""Quick-start programs for several devices fail with an error that states the supported alternative."""

import pytest

from fixtures.seed_programs import PROGRAMS, RunProgram

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
_NOT_YET = 'twinkle.infra.errors.NotSupportedYet: '


@pytest.mark.parametrize(
    'program',
    [
        'english/ray_grpo',
        'english/ray_sft',
        'english/device_groups',
        'chinese/ray_grpo',
        'chinese/readme_ray_sft',
    ],
)
def test_program_for_several_devices_is_refused(program: str, run_program: RunProgram) -> None:
    """A program for several devices exits with status 1 and a `NotSupportedYet` error."""
    run = run_program(program)
    assert run.code == 1
    assert run.last_line.startswith(_NOT_YET), run.out


@pytest.mark.parametrize('model', ['TransformersModel', 'MegatronModel'])
def test_component_in_a_remote_group_is_refused(model: str, run_program: RunProgram) -> None:
    """The constructor of a component with a mesh of several ranks raises `NotSupportedYet`."""
    groups = (PROGRAMS / 'english' / 'device_groups.txt').read_text().rpartition('twinkle.initialize(')[0]
    lines = (PROGRAMS / 'english' / 'remote_groups.txt').read_text().splitlines()
    (construct,) = [line for line in lines if line.startswith(f'model = {model}(')]
    imports = '\n'.join(line for line in lines if line.startswith('from'))
    program = f'{groups}\n{imports}\n{construct}\n'
    run = run_program('english/remote_groups', replaced={'\n'.join(lines): program})
    assert run.code == 1
    assert run.last_line.startswith(_NOT_YET), run.out
