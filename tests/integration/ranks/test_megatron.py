"""Layers on Megatron-core agree with `PackedCausalLM` within rounding; pipeline stages leave results bitwise equal."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from fixtures import megatron_user_program
from fixtures.mixture_model import build_mixture
from fixtures.peft_oracle import label_logprobs
from fixtures.source_tree import ROOT
from fixtures.tiny_model import build_tiny_model
from fixtures.torchrun import run_ranks
from twinkle.hub import resolve_model
from twinkle.model import TransformersModel

pytestmark = pytest.mark.timeout(300)
MESHES_PROGRAM = str(ROOT / 'tests' / 'fixtures' / 'megatron_meshes.py')
"""Path of a program that this process must not import, because importing Megatron-core causes warnings."""
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-6, 5e-6
"""Maximum relative differences from `PackedCausalLM`; gradients are compared by their largest element."""


@pytest.fixture(scope='module')
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny model whose output head is not tied to the embedding, and whose heads share keys and values."""
    return build_tiny_model(tmp_path_factory.mktemp('model'), family='qwen3')


def test_pipeline_stages_change_no_bit(model_dir: Path) -> None:
    """Two replicas of two stages have the digest of four replicas, and agree with `PackedCausalLM` within rounding."""
    _checked_meshes(model_dir, 'dp', 'dp x pp')


@pytest.mark.slow
def test_bits_depend_only_on_the_parts_of_layers(model_dir: Path) -> None:
    """Meshes with equally many tensor ranks have one digest; every mesh agrees with `PackedCausalLM` within rounding.

    The digest includes five losses, dropout, accumulation, a value head, an adapter of the output head, split calls and
    a loss that fails. The gradient of an adapter is bitwise the same in a separate pass and in a shared pass.
    """
    found = _checked_meshes(model_dir)
    # The share exceeds a quarter, because every stage has the embedding and the output head.
    assert found['pp x tp']['held'] < 0.4


@pytest.mark.slow
def test_tensor_ranks_divide_experts(tmp_path: Path) -> None:
    """Experts that are divided among ranks, and adapters of these experts, give the results of one process.

    Some of the adapters have rows that all use the same experts.
    """
    found = _checked_meshes(build_mixture(tmp_path))
    assert found['pp x tp']['held'] < 0.4
    assert all(line['lone'] <= GRADIENT_TOLERANCE for line in found.values())


def _checked_meshes(model_dir: Path, *names: str) -> dict[str, Any]:
    """Check the results of the named meshes, by default of all; return the program's output by mesh."""
    done = run_ranks(MESHES_PROGRAM, model_dir, *names, count=4)
    assert done.returncode == 0, done.stderr[-4000:]
    found = {line['mesh']: line for line in map(json.loads, done.stdout.splitlines())}
    assert len(found) == (len(names) or 5)
    digests: dict[bool, set[str]] = {}
    for name, line in found.items():
        assert line['loss'] <= LOSS_TOLERANCE, name
        assert line['gradient'] <= GRADIENT_TOLERANCE, name
        assert line['is_base_equal'], name
        assert line['is_isolated'], name
        digests.setdefault('tp' in name, set()).update(line['digests'])
    assert [len(equal) for equal in digests.values()] == [1] * len(digests)
    return found


@pytest.mark.slow
def test_program_saves_an_adapter_for_every_other_trainer(model_dir: Path, tmp_path: Path) -> None:
    """An adapter that four processes train with Megatron can be loaded by peft, and resumed by one process."""
    done = run_ranks(megatron_user_program.__file__, model_dir, tmp_path, count=4)
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads((tmp_path / f'rank-{rank}.json').read_text()) for rank in range(4)]
    assert [rank['sizes'] for rank in found] == [[4, 4]] * 4, 'ranks that differ in tp have read different examples'
    assert found[0]['logps'] == found[1]['logps'], 'ranks that differ in tp have different results'
    assert all('must pass the same examples' in rank['refusal'] for rank in found)
    assert all('only on one rank' in rank['failure'] for rank in found), 'not all ranks report the failure of one rank'
    example = megatron_user_program.EXAMPLE
    plain = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation='eager')
    with torch.no_grad():
        expected = label_logprobs(PeftModel.from_pretrained(plain, tmp_path / 'last'), **example)
    np.testing.assert_allclose(found[0]['logps'], expected, atol=1e-5)
    resumed = TransformersModel(str(model_dir))
    resumed.add_adapter_to_model('default', str(tmp_path / 'last'))
    resumed.resume_from_checkpoint(str(tmp_path / 'last'))
    np.testing.assert_allclose(resumed.forward_only([example])['logps'][0], found[0]['logps'], atol=1e-5)


@pytest.mark.slow
def test_real_model_on_three_tensor_ranks() -> None:
    """A model with nine heads and three key-value heads gives the results of one process on three ranks.

    Rounding differences grow over its thirty layers, even without tensor ranks (docs/LOG.md).
    """
    done = run_ranks(MESHES_PROGRAM, resolve_model('smollm2-135m-instruct'), '--axis', 'tp', count=3)
    assert done.returncode == 0, done.stderr[-4000:]
    (line,) = map(json.loads, done.stdout.splitlines())
    assert line['loss'] <= LOSS_TOLERANCE
    assert line['gradient_norm'] <= 1e-3
