"""Tests of the quick-start programs that need no services. Parts that need several devices are replaced."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from fixtures.seed_programs import RunProgram

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
LANGUAGES = ('english', 'chinese')
IN_ONE_PROCESS = {
    'from twinkle.model.megatron import MegatronModel': 'from twinkle.model import TransformersModel',
    'MegatronModel(': 'TransformersModel(',
    'from twinkle.sampler import vLLMSampler': 'from twinkle.sampler import TorchSampler as vLLMSampler',
    "mode='ray', nproc_per_node=NUM_GPUS, groups=device_groups, lazy_collect=False": 'groups=device_groups',
    "device_type='GPU'": "device_type='auto'",
    "model.set_optimizer('default', ": "model.set_optimizer('AdamW', ",
    "'default', lr_decay_steps=MAX_STEPS, max_lr=LEARNING_RATE": (
        "'CosineWarmupScheduler', num_warmup_steps=0, num_training_steps=MAX_STEPS"
    ),
    "'gpu_memory_utilization': 0.8,": '',
    "'max_lora_rank': 32, # save as lora_config": '',
    "'enable_lora': True,": '',
}
"""Replacements of the Ray program's parts that need Megatron, vLLM or several devices."""
SMALL = {
    'MODEL_GPUS': '1',
    'SAMPLER_GPUS': '1',
    'MAX_STEPS': '4',
    'BATCH_SIZE': '2',
    'NUM_GENERATIONS': '4',
    'MINI_BATCH_SIZE': '4',
    'MAX_NEW_TOKENS': '64',
}
"""Environment variables that reduce the program's sizes."""


@pytest.mark.parametrize('language', LANGUAGES)
def test_packing_program_prints_a_batch(language: str, run_program: RunProgram) -> None:
    """A program that only loads and packs a dataset prints the columns of a batch."""
    run = run_program(f'{language}/dataset_only')
    assert run.code == 0, run.out
    assert all(repr(column) in run.out for column in ('input_ids', 'position_ids', 'labels'))


@pytest.mark.parametrize('language', LANGUAGES)
def test_single_device_program_trains_its_adapter(language: str, run_program: RunProgram) -> None:
    """The program trains its adapter and saves it to the expected folder."""
    run = run_program(f'{language}/single_device_sft')
    assert run.code == 0, run.out
    (saved,) = run.folder.rglob('last-checkpoint/adapter_model.safetensors')
    weights = load_file(saved)
    # The initial values of these weights are zero.
    learned = [array for name, array in weights.items() if 'lora_B' in name]
    assert learned
    assert all(np.any(array != 0) for array in learned)


def test_single_device_program_without_adapter_trains_the_model(run_program: RunProgram, hub: Path) -> None:
    """The program trains and saves the whole model without the line that adds the adapter."""
    run = run_program('english/single_device_sft', replaced={'model.add_adapter_to_model(': '# ('})
    assert run.code == 0, run.out
    (saved,) = run.folder.rglob('last-checkpoint/model.safetensors')
    before = load_file(hub / 'models' / 'Qwen' / 'Qwen3.5-4B' / 'model.safetensors')
    after = load_file(saved)
    assert all(np.any(after[name] != array) for name, array in before.items())


@pytest.mark.parametrize('language', LANGUAGES)
def test_ray_program_runs_in_one_process(language: str, run_program: RunProgram) -> None:
    """The loop of the Ray program runs unchanged once its parts for several devices are replaced."""
    run = run_program(f'{language}/ray_grpo', replaced=IN_ONE_PROCESS, **SMALL)
    assert run.code == 0, run.out
    assert 'Training completed. optim_steps=4' in run.out
    assert list(run.folder.rglob('grpo-gsm8k-checkpoint/adapter_model.safetensors'))
