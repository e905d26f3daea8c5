"""GPUs of a machine are divided among trainers and samplers, unless the user configures devices."""

import stat
from pathlib import Path
from typing import Any

import pytest

from services.model.config import ModelConfig
from services.sampler.config import SamplerConfig
from twinkle_client.stack import StackOptions
from twinkle_client.stack.gpus import GpuShare, divided, least_used, local_gpus
from twinkle_client.stack.startup import gpu_needs


def _options(folder: Path, **fields: Any) -> StackOptions:
    return StackOptions(state_dir=folder, base_model='a', engine='torch', **fields)


@pytest.mark.parametrize(
    ('fields', 'expected'),
    [
        ({}, {'model': 1, 'sampler': 1}),
        ({'more_models': ('b',)}, {'model': 1, 'model-2': 1, 'sampler': 1, 'sampler-2': 1}),
        ({'trainer_count': 2, 'sampler_count': 0}, {'model': 1, 'model-trainer-2': 1}),
        ({'services': {'model': {'mesh': {'dp': 2, 'fsdp': 2}}}}, {'model': 4, 'sampler': 1}),
        ({'services': {'model': {'device': 'cpu'}}}, {'sampler': 1}),
        ({'services': {'model': {'gpus': ['1']}, 'sampler': {'torch': {'device': 'cpu'}}}}, {}),
        ({'services': {'sampler': {'gpus': ['0']}}}, {'model': 1}),
    ],
)
def test_every_process_without_a_configured_device_needs_gpus(
    tmp_path: Path, fields: dict[str, Any], expected: dict[str, int]
) -> None:
    """A process of a mesh needs one GPU for each rank, and the others one; configured devices are respected."""
    assert gpu_needs(_options(tmp_path, **fields)) == expected


def test_processes_of_one_gpu_divide_its_memory() -> None:
    """A trainer and a sampler on one GPU get half of its memory each, and with two GPUs one GPU each."""
    needs = {'model': 1, 'sampler': 1}
    assert divided((), needs) == {}
    assert divided(('0',), needs) == {'model': GpuShare(('0',), 0.45), 'sampler': GpuShare(('0',), 0.45)}
    assert divided(('0', '1'), needs) == {'model': GpuShare(('0',), 0.9), 'sampler': GpuShare(('1',), 0.9)}


def test_shares_of_a_gpu_never_exceed_its_memory() -> None:
    """The shares of all processes on a GPU add up to at most nine tenths, for several numbers of GPUs and processes."""
    for gpu_count in range(1, 9):
        gpus = tuple(map(str, range(gpu_count)))
        for needs in ({'model': 4, 'sampler': 2, 'sampler-2': 2}, {f'sampler-{index}': 1 for index in range(11)}):
            shares = divided(gpus, needs).values()
            assert all(len(set(share.gpus)) == len(share.gpus) for share in shares), 'no process has a GPU twice'
            used = {gpu: sum(share.memory for share in shares if gpu in share.gpus) for gpu in gpus}
            assert max(used.values()) <= 0.9 + 0.005 * len(needs)


def test_settings_are_fields_of_the_services() -> None:
    """The services accept the settings of a share for both engines."""
    share = GpuShare(('0', '1'), 0.45)
    model = ModelConfig(base_model='a', checkpoint_address='b:1', **share.trainer_settings)
    assert (model.device, model.gpus, model.gpu_memory_share) == ('cuda', ('0', '1'), 0.45)
    torch = SamplerConfig(base_model='a', gateways=('b:1',), **share.sampler_settings('torch'))
    assert (torch.gpus, torch.torch.device) == (('0', '1'), 'cuda')
    vllm = SamplerConfig(base_model='a', gateways=('b:1',), **share.sampler_settings('vllm'))
    assert vllm.vllm.engine_args == {'gpu_memory_utilization': 0.45}


def test_added_samplers_use_the_gpu_with_the_fewest_processes() -> None:
    """The GPUs of a new sampler are those with the fewest running processes, in their order."""
    assert least_used(('0', '1', '2'), [('0',), ('1', '0')], 2) == ['2', '1']
    assert least_used(('0',), [('0',)], 1) == ['0']


@pytest.mark.parametrize(
    ('environment', 'expected'),
    [({}, ('0', '1', '2')), ({'CUDA_VISIBLE_DEVICES': '2,0'}, ('2', '0')), ({'CUDA_VISIBLE_DEVICES': ''}, ())],
)
def test_visible_gpus_are_listed(environment: dict[str, str], expected: tuple[str, ...], tmp_path: Path) -> None:
    """The GPUs are those that the driver lists, or the user's variable; without a driver, the list is empty."""
    program = tmp_path / 'nvidia-smi'
    program.write_text('#!/bin/sh\nprintf "0\\n1\\n2\\n"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    assert local_gpus(environment, program=str(program)) == expected
    assert local_gpus(environment, program=str(tmp_path / 'absent')) == ()
