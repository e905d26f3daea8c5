"""Replays a journal on this machine: `python -m twinkle_services.model.replay --journal FOLDER --config FILE`.

The program prints its progress and the first divergence: adapter, operation, field, recorded value and replayed value.
The exit status is 0 if all replayed results are bitwise equal to the recorded ones, 1 after a divergence, and 2 if the
journal cannot be replayed.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from twinkle.plugin import keep_plugins_out
from twinkle_services.kit.config import load_config
from twinkle_services.kit.errors import DomainError
from twinkle_services.model.application.find_divergence import FindDivergence, ReplayResult
from twinkle_services.model.assembly import FULL_GRADIENT_SUM, LOAD_ERRORS, TREE_SUM, codec_of, load_backend
from twinkle_services.model.backends.journal.environment import stored_environment
from twinkle_services.model.backends.journal.schema import JournalRefused
from twinkle_services.model.backends.journal.sqlite_journal import SqliteJournal
from twinkle_services.model.config import MeshConfig, ModelConfig
from twinkle_services.model.ports import TrainerBackend


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay the journal that the command line names, and return the exit status."""
    keep_plugins_out()
    parser = argparse.ArgumentParser(prog='python -m twinkle_services.model.replay', description='Replays a journal.')
    parser.add_argument('--journal', type=Path, required=True, metavar='FOLDER', help='a copy of <state_dir>/journal')
    parser.add_argument('--config', type=Path, metavar='FILE', help='configuration of the model service')
    parser.add_argument('--adapter', metavar='ID', help='replay one adapter; default: all')
    parser.add_argument(
        '--set', action='append', default=[], metavar='FIELD=VALUE', help='override a setting of the configuration'
    )
    options = parser.parse_args(arguments)
    config_arguments = ['--config', str(options.config)] if options.config else []
    for assignment in options.set:
        config_arguments += ['--set', assignment]
    config = load_config(ModelConfig, config_arguments)
    rounding = [name for name, size in (('tp', config.mesh.tp), ('ulysses', config.mesh.ulysses)) if size > 1]
    if rounding:
        _print(f'cannot be replayed: results of mesh.{rounding[0]} > 1 are rounded differently than in one process')
        return 2
    try:
        replayed = asyncio.run(_replay(config, options.journal, options.adapter))
    except (DomainError, JournalRefused, _NotLoaded) as error:
        _print(f'cannot be replayed: {error}')
        return 2
    return _report(replayed)


class _NotLoaded(Exception):
    """The model of the configuration cannot be loaded."""


def _is_sharded(config: ModelConfig, folder: Path) -> bool:
    """Return whether FSDP divided the full-parameter runs of the service that used the journal last."""
    used = stored_environment(folder).get(FULL_GRADIENT_SUM)
    return config.mesh.fsdp > 1 if used is None else used != TREE_SUM


async def _replay(config: ModelConfig, folder: Path, adapter_id: str | None) -> ReplayResult:
    # Without `tp` and `ulysses`, one process computes the same results as the mesh that wrote the journal.
    try:
        backend = await load_backend(config.model_copy(update={'mesh': MeshConfig()}))
    except LOAD_ERRORS as error:
        raise _NotLoaded(f'the model cannot be loaded: {error}') from error
    try:
        return await replay_folder(folder, backend, adapter_id, is_sharded=_is_sharded(config, folder))
    finally:
        await backend.close()


async def replay_folder(
    folder: Path, backend: TrainerBackend, adapter_id: str | None = None, *, is_sharded: bool = False
) -> ReplayResult:
    """Replay one adapter of the journal in `folder` on an engine, or all adapters by default; see `FindDivergence`.

    Raises:
        JournalRefused: The folder contains no readable journal.
        AdapterNotFound, AdapterDamaged: See `FindDivergence`.
    """
    journal = await SqliteJournal.open_copy(folder, codec=codec_of(backend))
    try:
        return await FindDivergence(journal, backend, report=_print, is_sharded=is_sharded)(adapter_id)
    finally:
        await journal.close()


def _report(replayed: ReplayResult) -> int:
    divergence = replayed.divergence
    if replayed.left_out_count and not replayed.adapter_count:
        return 2
    if divergence is None:
        _print(f'{replayed.operation_count} operations of {replayed.adapter_count} adapters are bitwise equal')
        return 0
    location = f'{divergence.adapter_id}, operation {divergence.sequence_number} ({divergence.verb_name})'
    _print(f'DIVERGED: {location}: {divergence.difference}')
    return 1


def _print(line: str) -> None:
    sys.stdout.write(line + '\n')
    sys.stdout.flush()


if __name__ == '__main__':
    sys.exit(main())
