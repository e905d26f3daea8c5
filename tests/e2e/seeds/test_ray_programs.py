"""The quick-start programs for Ray run with their components in worker processes."""

from pathlib import Path

import pytest

from fixtures.seed_programs import PROGRAMS, RunProgram

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ON_CPU = {"device_type='cuda'": "device_type='cpu'"}
"""Replacement that moves the workers to CPUs."""
EXAMPLES = {'range(1000)': 'range(40)'}
"""Replacement that reduces the number of examples."""
GRPO_SIZES = {
    'MODEL_ID': 'ms://Qwen/Qwen3-4B',
    'MODEL_GPUS': '2',
    'SAMPLER_GPUS': '2',
    'MAX_STEPS': '3',
    'BATCH_SIZE': '2',
    'NUM_GENERATIONS': '4',
    'MINI_BATCH_SIZE': '4',
    'MAX_NEW_TOKENS': '32',
}
"""Environment variables that reduce the program's sizes and select a model that vLLM can run on CPUs."""
STEP = """
from twinkle.data_format import LoraConfig
model.add_adapter_to_model('default', LoraConfig(r=4, target_modules='all-linear'))
model.set_optimizer('AdamW', lr=1e-3)
loss = model.forward_backward([{'input_ids': [5, 6, 7, 8], 'labels': [6, 7, 8, -100]}])['loss']
model.clip_grad_and_step()
print('trained:', loss)
"""
"""Statements that train one step, appended to a program that only creates a trainer."""
ON_CPUS = {
    "device_type='GPU'": "device_type='CPU'",
    "'gpu_memory_utilization': 0.8,": "'kv_cache_memory_bytes': 1 << 26,",
    "'enable_lora': True,": '',
}
"""Replacements of options that need GPUs."""


@pytest.mark.parametrize('program', ['english/ray_sft', 'chinese/ray_sft', 'chinese/readme_ray_sft'])
def test_sft_program_trains_the_adapter_of_one_process(program: str, run_program: RunProgram, tmp_path: Path) -> None:
    """Four workers (two copies of the model in two shards each) save bitwise the same adapter as one worker."""
    weights: list[bytes] = []
    for ranks, sizes in ((1, 'fsdp_size=1, dp_size=1'), (4, 'fsdp_size=2, dp_size=2')):
        folder = tmp_path / f'{ranks} workers'
        folder.mkdir()
        replaced = {**ON_CPU, **EXAMPLES, 'ranks=8': f'ranks={ranks}', 'fsdp_size=4, dp_size=2': sizes}
        run = run_program(program, folder=folder, replaced=replaced)
        assert run.code == 0, run.out
        (saved,) = folder.rglob('last-checkpoint/adapter_model.safetensors')
        weights.append(saved.read_bytes())
    assert weights[0] == weights[1]


@pytest.mark.parametrize('language', ['english', 'chinese'])
def test_grpo_program_trains_with_two_groups(language: str, run_program: RunProgram) -> None:
    """A program with two Megatron workers for training and two vLLM workers for sampling saves an adapter."""
    run = run_program(f'{language}/ray_grpo', replaced=ON_CPUS, **GRPO_SIZES)
    assert run.code == 0, run.out
    assert 'Training completed. optim_steps=3' in run.out
    assert list(run.folder.rglob('grpo-gsm8k-checkpoint/adapter_model.safetensors'))


@pytest.mark.parametrize('model', ['TransformersModel', 'MegatronModel'])
def test_program_with_pipeline_and_tensor_ranks_trains(model: str, run_program: RunProgram) -> None:
    """A trainer on a mesh of two pipeline stages with two tensor ranks each trains an adapter in four workers."""
    groups = (PROGRAMS / 'english' / 'device_groups.txt').read_text().rpartition('twinkle.initialize(')[0]
    lines = (PROGRAMS / 'english' / 'remote_groups.txt').read_text().splitlines()
    (construct,) = [line for line in lines if line.startswith(f'model = {model}(')]
    imports = '\n'.join(line for line in lines if line.startswith('from'))
    for old, new in (("device_type='cuda'", "device_type='cpu'"), ('ranks=8', 'ranks=4'), ('dp_size=2', 'dp_size=1')):
        assert old in groups
        groups = groups.replace(old, new)
    construct = construct.replace('Qwen/Qwen3.5-4B', 'ms://Qwen/Qwen3-4B')
    initialize = "twinkle.initialize(mode='ray', nproc_per_node=4, groups=device_group)"
    program = f'{groups}\n{initialize}\n{imports}\n{construct}\n{STEP}'
    run = run_program('english/remote_groups', replaced={'\n'.join(lines): program})
    assert run.code == 0, run.out
    assert run.last_line.startswith('trained: ')
