"""Tests that an adapter's results are bitwise independent of the rest of the pass."""

import os
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest
import torch
import transformers

from fixtures import isolation
from twinkle.nn import PackedCausalLM
from twinkle.nn.rows import padded_row_count, stable_rows

ROOT = Path(__file__).parents[3]
ODD_WIDTHS = transformers.LlamaConfig(
    hidden_size=72,
    intermediate_size=100,
    num_hidden_layers=2,
    num_attention_heads=3,
    num_key_value_heads=1,
    head_dim=24,
    vocab_size=333,
    max_position_embeddings=256,
    pad_token_id=0,
)
"""Widths that are not multiples of a vector register, so that rows are unaligned and tensors end in a scalar tail."""
RECURRENT = transformers.Qwen3_5TextConfig(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=333,
    max_position_embeddings=256,
    pad_token_id=0,
    linear_num_value_heads=3,
    linear_num_key_heads=3,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
)
"""Three Gated DeltaNet layers and one attention layer."""
FOLDERS = ('tiny_llama_dir', 'tiny_qwen3_dir', 'odd_dir', 'recurrent_dir')


@pytest.fixture(scope='session')
def odd_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a model with odd widths."""
    folder = tmp_path_factory.mktemp('odd')
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(ODD_WIDTHS).save_pretrained(folder)
    return folder


@pytest.fixture(scope='session')
def recurrent_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a model with recurrent layers."""
    folder = tmp_path_factory.mktemp('recurrent')
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(RECURRENT).save_pretrained(folder)
    return folder


@pytest.mark.parametrize('name', FOLDERS)
def test_results_in_a_mix_are_bitwise_equal_to_results_alone(name, request):
    """Log-probabilities, entropies and gradients do not depend on other rows, for any ranks, targets and lengths."""
    model = PackedCausalLM.load(request.getfixturevalue(name))
    assert [line for seed in range(4) for line in isolation.violations(model, seed, longest=120)] == []


@pytest.mark.parametrize('name', FOLDERS)
def test_half_precision_is_isolated_bitwise(name, request):
    """Results in bfloat16 do not depend on other rows."""
    model = PackedCausalLM.load(request.getfixturevalue(name), dtype='bfloat16')
    assert not any(isolation.deviations(model, 0, longest=120) + isolation.deviations(model, 1, longest=120))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs an accelerator')
@pytest.mark.parametrize(('dtype', 'summary', 'tolerance'), [('float32', max, 1e-2), ('bfloat16', median, 0.3)])
@pytest.mark.parametrize('name', FOLDERS)
def test_results_in_a_mix_on_an_accelerator_equal_results_alone(name, dtype, summary, tolerance, request):
    """Results in a mix equal results alone within a tolerance, because the number of rows selects the kernels."""
    model = PackedCausalLM.load(request.getfixturevalue(name), dtype=dtype, device='cuda')
    assert all(summary(isolation.deviations(model, seed, longest=120)) < tolerance for seed in range(4))


@pytest.mark.slow
def test_isolation_holds_on_two_threads(odd_dir):
    """Results do not depend on other adapters when kernels split their work between two threads."""
    command = [sys.executable, isolation.__file__, str(odd_dir), '--threads', '2', '--seeds', '10', '13']
    paths = [str(ROOT / 'tests'), str(ROOT / 'sdk' / 'python')]
    finished = subprocess.run(
        [*command, '--longest', '120'],
        # Threads that wait actively would slow each other down on a busy machine.
        env={**os.environ, 'OMP_NUM_THREADS': '2', 'OMP_WAIT_POLICY': 'passive', 'PYTHONPATH': os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (finished.returncode, finished.stdout) == (0, ''), finished.stderr


def test_unaligned_or_few_rows_are_copied():
    """Products get at least 16 aligned rows. Rows are copied only if they are unaligned or fewer than 16."""
    buffer = torch.zeros(100, 5)
    assert stable_rows(buffer[:20]).data_ptr() == buffer.data_ptr()
    assert stable_rows(buffer[1:21]).data_ptr() % 64 == 0
    assert stable_rows(buffer[1:4]).shape == (16, 5)


@pytest.mark.parametrize(
    ('rows', 'widths', 'expected'), [(3, {64, 128}, 16), (40, {64}, 40), (40, {72, 100}, 40), (41, {72, 100}, 48)]
)
def test_rows_are_added_until_no_tensor_has_a_scalar_tail(rows, widths, expected):
    """The padded number of rows times any width is a multiple of the widest vector loop."""
    assert padded_row_count(rows, widths) == expected
