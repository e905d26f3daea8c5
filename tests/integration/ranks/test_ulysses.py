"""Ranks that divide the rows of passes give the results of one process within rounding."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, LlamaConfig

from fixtures import row_ranks_program, ulysses_meshes
from fixtures.mixture_model import build_mixture
from fixtures.peft_oracle import label_logprobs
from fixtures.torchrun import run_ranks
from twinkle.model import TransformersModel

pytestmark = pytest.mark.timeout(300)
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-7, 1e-6
"""Maximum relative differences from one process; gradients are compared by their largest element."""
HALF_LOSS_TOLERANCE, HALF_GRADIENT_TOLERANCE = 2e-2, 5e-2
"""Maximum relative differences in bfloat16, where gradients are compared by their norm."""


@pytest.fixture(scope='module')
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny model with four query heads and two key-value heads, which are copied to four ranks."""
    folder = tmp_path_factory.mktemp('model')
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        pad_token_id=2,
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_results_depend_only_on_the_number_of_row_ranks(model_dir: Path) -> None:
    """Two meshes with equal numbers of row ranks have one digest, and agree with one process within rounding.

    The digest includes five losses, dropout, accumulation, a value head, an adapter of the output head, split calls and
    a loss that fails. The gradient of an adapter is bitwise the same in a separate pass and in a shared pass.
    """
    found = _run(model_dir, 'dp x ulysses', 'fsdp x ulysses, recomputed')
    (digest,) = set(found['dp x ulysses']['digests'])
    for name, line in found.items():
        _check_close(line)
        assert set(line['digests']) == {digest}, name
    assert found['dp x ulysses']['saved'] < 0.56
    assert found['fsdp x ulysses, recomputed']['held'] < 0.26


@pytest.mark.slow
def test_every_mesh_is_close_to_one_process(model_dir: Path) -> None:
    """Four row ranks, recomputed activations, sharded weights and bfloat16 give nearly the results of one process."""
    found = _run(model_dir, 'ulysses 4', 'dp x ulysses', 'dp x ulysses, recomputed', 'fsdp x ulysses', 'bfloat16')
    for name, line in found.items():
        _check_close(line, is_half=name == 'bfloat16')
        assert len(set(line['digests'])) == 1, name
    digests = {name: line['digests'][0] for name, line in found.items() if 'x' in name}
    assert len(set(digests.values())) == 1
    assert found['ulysses 4']['saved'] < 0.33


@pytest.mark.slow
def test_experts_run_the_rows_of_their_rank(tmp_path: Path) -> None:
    """Expert adapters have the gradients of one process within rounding, and equal digests on all meshes."""
    found = _run(build_mixture(tmp_path), 'dp x ulysses', 'fsdp x ulysses')
    for line in found.values():
        _check_close(line)
    assert len({digest for line in found.values() for digest in line['digests']}) == 1


def _run(model_dir: Path, *names: str) -> dict[str, dict[str, Any]]:
    done = run_ranks(ulysses_meshes.__file__, model_dir, *names, count=4)
    assert done.returncode == 0, done.stderr[-4000:]
    found = {line['mesh']: line for line in map(json.loads, done.stdout.splitlines())}
    assert set(found) == set(names)
    return found


def _check_close(line: dict[str, Any], *, is_half: bool = False) -> None:
    for adapter, found in line['differences'].items():
        assert found['loss'] <= (HALF_LOSS_TOLERANCE if is_half else LOSS_TOLERANCE), (line['mesh'], adapter)
        if is_half:
            assert found['gradient_norm'] <= HALF_GRADIENT_TOLERANCE, (line['mesh'], adapter)
        else:
            assert found['gradient'] <= GRADIENT_TOLERANCE, (line['mesh'], adapter)
    assert line['is_base_equal'], line['mesh']
    assert line['is_isolated'], line['mesh']


@pytest.mark.slow
def test_program_saves_an_adapter_for_every_other_trainer(model_dir: Path, tmp_path: Path) -> None:
    """An adapter that four processes train can be loaded by peft, and resumed by one process."""
    done = run_ranks(row_ranks_program.__file__, model_dir, tmp_path, count=4)
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads((tmp_path / f'rank-{rank}.json').read_text()) for rank in range(4)]
    assert [rank['sizes'] for rank in found] == [[4, 4]] * 4, 'ranks that differ in ulysses read different examples'
    assert found[0]['logps'] == found[1]['logps'], 'ranks that differ in ulysses have different results'
    assert all('must pass the same examples' in rank['refusals']['examples'] for rank in found)
    assert all('only on one rank' in rank['refusals']['loss'] for rank in found), 'not all ranks report the failure'
    assert all('does not support ulysses_size' in rank['refusals']['full parameters'] for rank in found)
    example = row_ranks_program.EXAMPLE
    plain = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation='eager')
    with torch.no_grad():
        expected = label_logprobs(PeftModel.from_pretrained(plain, tmp_path / 'last'), **example)
    np.testing.assert_allclose(found[0]['logps'], expected, atol=1e-5)
    resumed = TransformersModel(str(model_dir))
    resumed.add_adapter_to_model('default', str(tmp_path / 'last'))
    resumed.resume_from_checkpoint(str(tmp_path / 'last'))
    np.testing.assert_allclose(resumed.forward_only([example])['logps'][0], found[0]['logps'], atol=1e-5)
