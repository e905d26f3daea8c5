"""The GPUs of a machine are divided among trainers and samplers, unless the user configures devices."""

import stat
from pathlib import Path
from typing import Any

import pytest

from twinkle_client.stack import StackError, StackOptions
from twinkle_client.stack.gpus import GpuNeed, GpuShare, divided, local_gpus, unused_share, with_gpus
from twinkle_client.stack.startup import gpu_needs
from twinkle_services.model.config import ModelConfig
from twinkle_services.sampler.config import SamplerConfig


def _options(folder: Path, **fields: Any) -> StackOptions:
    return StackOptions(state_dir=folder, base_model='a', engine='torch', **fields)


@pytest.mark.parametrize(
    ('fields', 'expected'),
    [
        ({}, {'model': 1, 'sampler': 1}),
        ({'more_models': ('b',)}, {'model': 1, 'model-2': 1, 'sampler': 1, 'sampler-2': 1}),
        ({'trainer_count': 2, 'sampler_count': 0}, {'model': 1, 'model-trainer-2': 1, 'sampler': 1}),
        ({'services': {'model': {'mesh': {'dp': 2, 'fsdp': 2}}}}, {'model': 4, 'sampler': 1}),
        ({'services': {'model': {'device': 'cpu'}}}, {'sampler': 1}),
        ({'services': {'model': {'device': 'cuda:1'}, 'sampler': {'torch': {'device': 'cpu'}}}}, {}),
        ({'services': {'model': {'device': 'cuda'}, 'sampler': {'gpus': ['0']}}}, {'model': 1, 'sampler': 1}),
    ],
)
def test_every_process_without_a_configured_device_needs_gpus(
    tmp_path: Path, fields: dict[str, Any], expected: dict[str, int]
) -> None:
    """A mesh needs one GPU for each rank, and every other process needs one GPU; configured devices are respected."""
    needs = gpu_needs(_options(tmp_path, **fields))
    assert {name: need.count for name, need in needs.items()} == expected


def test_processes_of_one_gpu_divide_its_memory() -> None:
    """A trainer and a sampler each get 45 % of a single GPU's memory; with two GPUs, each gets 90 % of one GPU."""
    needs = {'model': GpuNeed(1), 'sampler': GpuNeed(1)}
    assert divided((), needs) == {}
    assert divided(('0',), needs) == {'model': GpuShare(('0',), 0.45), 'sampler': GpuShare(('0',), 0.45)}
    assert divided(('0', '1'), needs) == {'model': GpuShare(('0',), 0.9), 'sampler': GpuShare(('1',), 0.9)}


def test_shares_of_a_gpu_never_exceed_its_memory() -> None:
    """The shares of one GPU's memory add up to at most 0.9, apart from rounding, for several numbers of processes."""
    for gpu_count in range(1, 9):
        gpus = tuple(map(str, range(gpu_count)))
        for counts in ({'model': 4, 'sampler': 2, 'sampler-2': 2}, {f'sampler-{index}': 1 for index in range(11)}):
            needs = {name: GpuNeed(count) for name, count in counts.items()}
            shares = divided(gpus, needs).values()
            assert all(len(set(share.gpus)) == len(share.gpus) for share in shares), 'a process has a GPU twice'
            used = {gpu: sum(share.memory for share in shares if gpu in share.gpus) for gpu in gpus}
            assert max(used.values()) <= 0.9 + 0.005 * len(needs)


def test_settings_are_fields_of_the_services() -> None:
    """The services accept the settings of a share, with both engines."""
    share = GpuShare(('0', '1'), 0.45)
    model = ModelConfig(base_model='a', checkpoint_address='b:1', **share.trainer_settings)
    assert (model.device, model.gpus, model.gpu_memory_share) == ('cuda', ('0', '1'), 0.45)
    torch = SamplerConfig(base_model='a', gateways=('b:1',), **share.sampler_settings('torch'))
    assert (torch.gpus, torch.torch.device) == (('0', '1'), 'cuda')
    vllm = SamplerConfig(base_model='a', gateways=('b:1',), **share.sampler_settings('vllm'))
    assert vllm.vllm.engine_args == {'gpu_memory_utilization': 0.45}


def test_chosen_gpus_are_left_to_their_process() -> None:
    """Other processes use the remaining GPUs, or share the chosen GPU if there is no other; absent GPUs are refused."""
    needs = {'model': GpuNeed(1), 'sampler': GpuNeed(1, ('0',))}
    assert divided(('0', '1'), needs) == {'model': GpuShare(('1',), 0.9), 'sampler': GpuShare(('0',), 0.9)}
    assert divided(('0',), needs) == {'model': GpuShare(('0',), 0.45), 'sampler': GpuShare(('0',), 0.45)}
    with pytest.raises(StackError, match='there is no GPU 0; this machine has 1'):
        divided(('1',), needs)


def test_trainers_of_an_earlier_start_stay_on_the_cpu(tmp_path: Path) -> None:
    """Model services that trained on the CPU keep the CPU unless the user moves them; those on GPUs keep GPUs."""
    moved = {'services': {'model': {'device': 'cuda'}}}
    assert 'model' not in gpu_needs(_options(tmp_path), earlier={'dtype': 'auto'})
    assert 'model' in gpu_needs(_options(tmp_path, **moved), earlier={'dtype': 'auto'})
    assert 'model' in gpu_needs(_options(tmp_path), earlier={'device': 'cuda'})


def test_added_samplers_use_the_memory_that_is_left() -> None:
    """A new sampler gets the GPU with the most unassigned memory, as settings of its engine, or it is refused."""
    trainer = {'gpus': ['0'], 'gpu_memory_share': 0.6}
    sampler = {'gpus': ['1'], 'engine': 'vllm', 'vllm': {'engine_args': {'gpu_memory_utilization': 0.9, 'seed': 1}}}
    share = unused_share(('0', '1'), [trainer, sampler, {'base_models': []}], 1)
    assert share == GpuShare(('0',), 0.3)
    added = with_gpus(sampler, share)
    assert added['gpus'] == ['0']
    assert added['vllm'] == {'engine_args': {'gpu_memory_utilization': 0.3, 'seed': 1}}
    assert with_gpus({**sampler, 'engine': 'torch'}, share)['torch'] == {'device': 'cuda'}
    with pytest.raises(StackError, match='no GPU has memory for another sampler'):
        unused_share(('1',), [sampler], 1)


@pytest.mark.parametrize(
    ('environment', 'expected'),
    [
        ({}, ('0', '1', '2')),
        ({'CUDA_VISIBLE_DEVICES': '2,0'}, ('2', '0')),
        ({'CUDA_VISIBLE_DEVICES': 'GPU-4f,1'}, ('GPU-4f', '1')),
        ({'CUDA_VISIBLE_DEVICES': '1,-1,0'}, ('1',)),
        ({'CUDA_VISIBLE_DEVICES': '-1'}, ()),
        ({'CUDA_VISIBLE_DEVICES': ''}, ()),
    ],
)
def test_visible_gpus_are_listed(environment: dict[str, str], expected: tuple[str, ...], tmp_path: Path) -> None:
    """CUDA_VISIBLE_DEVICES selects GPUs; if it is unset, all GPUs of the driver are used, or none without a driver."""
    program = tmp_path / 'nvidia-smi'
    program.write_text('#!/bin/sh\nprintf "0\\n1\\n2\\n"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    assert local_gpus(environment, program=str(program)) == expected
    assert local_gpus(environment, program=str(tmp_path / 'absent')) == ()
