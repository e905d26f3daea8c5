"""Restarts of the real engine during training with a journal on disk, and checks of a journal by the replay tool."""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from fixtures import model_service
from fixtures.model_service import draw_example, forward_backward, serving_model
from twinkle.api.model.v1 import operation_pb2 as wire
from twinkle.api.model.v1 import operation_result_pb2
from twinkle_services.kit import sqlite_seals
from twinkle_services.model import replay
from twinkle_services.model.config import ModelConfig

STEPS = 4


async def _train(model, adapter_id, numbers):
    results = []
    for number in numbers:
        if number % 2:
            verb = {'forward_backward': forward_backward([draw_example(16, number), draw_example(9, number + 50)])}
        else:
            verb = {'clip_grad_and_step': wire.ClipGradAndStep(max_grad_norm=0.5)}
        results.append(await model.result(adapter_id, number, **verb))
    return results


def _comparable_results(results):
    """Return the serialized results without the fields that depend on the run."""
    serialized = []
    for result in results:
        copy = type(result)()
        copy.CopyFrom(result)
        for name in ('receipt', 'adapter_id', 'is_replayed'):
            copy.ClearField(name)
        serialized.append(copy.SerializeToString(deterministic=True))
    return serialized


async def _saved_weights(model, adapter_id, number):
    saved = (await model.result(adapter_id, number, save=wire.Save(name='end', is_optimizer_included=True))).save
    return _safetensors_of(Path(saved.folder))


def _safetensors_of(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.suffix == '.safetensors'}


CONFIG = {'lora_config': {'lora_rank': 4, 'lora_dropout': 0.1, 'seed': 11}}


@pytest.mark.parametrize('snapshot_operations', [3, 256])
async def test_restart_within_a_run_does_not_change_results(tiny_llama_dir, tmp_path, snapshot_operations):
    """Results, repeats and saved weights after a restart are bitwise equal to those of an uninterrupted run."""
    async with serving_model(tiny_llama_dir, tmp_path / 'one') as model:
        adapter = await model.create(**CONFIG)
        expected = await _train(model, adapter.adapter_id, range(1, 2 * STEPS + 1))
        weights = await _saved_weights(model, adapter.adapter_id, 2 * STEPS + 1)
    results, settings = [], {'snapshot_operations': snapshot_operations}
    adapter_id = ''
    for begin in range(1, 2 * STEPS + 1, 3):
        async with serving_model(tiny_llama_dir, tmp_path / 'two', **settings) as model:
            adapter_id = (await model.create(**CONFIG)).adapter_id
            results += await _train(model, adapter_id, range(begin, min(begin + 3, 2 * STEPS + 1)))
    async with serving_model(tiny_llama_dir, tmp_path / 'two', **settings) as model:
        repeats = await _train(model, adapter_id, range(1, 2 * STEPS + 1))
        assert await _saved_weights(model, adapter_id, 2 * STEPS + 1) == weights
    assert _comparable_results(results) == _comparable_results(expected) == _comparable_results(repeats)
    assert all(result.is_replayed for result in repeats)


async def test_replay_tool_confirms_a_correct_journal_and_reports_errors(tiny_llama_dir, tmp_path):
    """The replay tool confirms a correct copy of a journal, and reports a wrong record with both values."""
    async with serving_model(tiny_llama_dir, tmp_path / 'one', snapshot_operations=3) as model:
        adapter = await model.create(**CONFIG)
        await _train(model, adapter.adapter_id, range(1, 10))
        assert (await model.result(adapter.adapter_id, 10, undo=wire.Undo(step_count=2))).step.step_count == 2
        await _train(model, adapter.adapter_id, range(11, 14))
    copy = tmp_path / 'copy'
    shutil.copytree(tmp_path / 'one' / 'journal', copy)
    backend = await model_service.load_backend(
        ModelConfig(base_model=str(tiny_llama_dir), checkpoint_address='none:1', thread_count=1)
    )
    try:
        replayed = await replay.replay_folder(copy, backend)
        assert (replayed.adapter_count, replayed.divergence) == (1, None)
        assert replayed.operation_count >= 4
        _change_result(copy / 'journal.sqlite', 12)
        replayed = await replay.replay_folder(copy, backend)
        assert replayed.divergence.sequence_number == 12
        assert replayed.divergence.adapter_id == adapter.adapter_id
        assert 'grad_norm: recorded 0.125, found' in replayed.divergence.difference
    finally:
        await backend.close()


def _change_result(database: Path, number: int) -> None:
    with closing(sqlite3.connect(database)) as connection, connection:
        sqlite_seals.prepare(connection)
        query = 'SELECT outcome FROM operations WHERE number = ?'
        outcome = operation_result_pb2.OperationResult.FromString(connection.execute(query, (number,)).fetchone()[0])
        outcome.step.grad_norm = 0.125
        values = (outcome.SerializeToString(), number)
        connection.execute('UPDATE operations SET outcome = ? WHERE number = ?', values)
