"""What an adapter gets does not depend, in any bit, on what shares the pass with it."""

import os
import subprocess
import sys
from pathlib import Path

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
"""Widths that no vector register divides, so that rows begin at any alignment and tensors end in a scalar tail."""
FOLDERS = ('tiny_llama_dir', 'tiny_qwen3_dir', 'odd_dir')


@pytest.fixture(scope='session')
def odd_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of odd widths."""
    folder = tmp_path_factory.mktemp('odd')
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(ODD_WIDTHS).save_pretrained(folder)
    return folder


@pytest.mark.parametrize('name', FOLDERS)
def test_any_mix_gives_each_adapter_the_bits_it_gets_alone(name, request):
    """Log-probabilities, entropies and gradients are equal over ranks, targets, dropout, lengths and neighbours."""
    model = PackedCausalLM.load(request.getfixturevalue(name))
    assert [line for seed in range(4) for line in isolation.violations(model, seed, longest=120)] == []


def test_isolation_holds_on_two_threads(odd_dir):
    """With kernels cut between threads the bits are still each adapter's own."""
    command = [sys.executable, isolation.__file__, str(odd_dir), '--threads', '2', '--seeds', '10', '13']
    paths = [str(ROOT / 'tests'), str(ROOT / 'sdk' / 'python')]
    finished = subprocess.run(
        [*command, '--longest', '120'],
        # Threads that spin for each other would wait long on a busy machine.
        env={**os.environ, 'OMP_NUM_THREADS': '2', 'OMP_WAIT_POLICY': 'passive', 'PYTHONPATH': os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (finished.returncode, finished.stdout) == (0, ''), finished.stderr


def test_rows_that_share_a_register_with_a_neighbour_are_copied():
    """Products see aligned rows, at least 16 of them; rows that are so already are not copied."""
    buffer = torch.zeros(100, 5)
    assert stable_rows(buffer[:20]).data_ptr() == buffer.data_ptr()
    assert stable_rows(buffer[1:21]).data_ptr() % 64 == 0
    assert stable_rows(buffer[1:4]).shape == (16, 5)


@pytest.mark.parametrize(
    ('rows', 'widths', 'expected'), [(3, {64, 128}, 16), (40, {64}, 40), (40, {72, 100}, 40), (41, {72, 100}, 48)]
)
def test_rows_are_added_until_no_tensor_has_a_scalar_tail(rows, widths, expected):
    """The element count of rows times any width is a multiple of the widest vector loop's."""
    assert padded_row_count(rows, widths) == expected
