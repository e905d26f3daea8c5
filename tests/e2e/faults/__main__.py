"""Injects faults for N seeds, and counts violations: `./run faults [N] [--transfers | --gateway | --ranks [PLAN]]`.

By default, the faults affect the model service. With `--transfers` they affect weight transfers to samplers, with
`--gateway` the gateway during a Tinker SDK program, and with `--ranks` one process of a model service that has
several processes.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from e2e.faults.gateway import run_seeds
from e2e.faults.rounds import Oracle, RoundReport, open_environment, run_round, running_harness
from e2e.faults.schedule import count_kills, kills_of, rank_kills_of, round_of, seeds_of
from e2e.faults.transfers import TransferHarness
from fixtures.faulty_mesh import MESH_PLANS
from fixtures.tiny_model import build_tiny_model

_MAX_LINES = 6
"""Maximum number of violations to print for a seed."""
_PARALLEL_ROUNDS = min(2, os.cpu_count() or 1)
"""Default number of rounds that run in parallel: 2, or 1 on a machine with a single core."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 1 if there was a violation."""
    parser = argparse.ArgumentParser(prog='./run faults', description=__doc__)
    parser.add_argument('count', nargs='?', type=_number, default=100, help='number of seeds (default: 100)')
    parser.add_argument('--seed', type=partial(_number, least=0), help='run only the round of this seed')
    parser.add_argument(
        '--at-once', type=_number, default=_PARALLEL_ROUNDS, help='rounds to run in parallel, by default 2'
    )
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument('--transfers', action='store_true', help='inject faults into weight transfers')
    kinds.add_argument('--gateway', action='store_true', help='kill the gateway during a Tinker SDK program')
    kinds.add_argument(
        '--ranks',
        nargs='?',
        const='sharded',
        choices=MESH_PLANS,
        help='kill and stop processes of a mesh: sharded weights (default), pipeline stages, tensor parallelism, ranks '
        'that divide rows, or a mesh on a Ray cluster of two nodes in network namespaces, which requires root',
    )
    options = parser.parse_args(arguments)
    only = options.seed
    seeds = range(options.count) if only is None else range(only, only + 1)
    if options.transfers:
        return asyncio.run(_run_transfers(seeds))
    if options.gateway:
        return _run_gateway(seeds)
    if options.seed is not None:
        rounds: Iterable[range] = [seeds_of(round_of(options.seed))]
    else:
        last = round_of(options.count - 1)
        rounds = [seeds_of(number)[: options.count - number * len(seeds_of(0))] for number in range(last + 1)]
    return asyncio.run(_run(list(rounds), ranks=options.ranks, at_once=options.at_once))


def _number(text: str, *, least: int = 1) -> int:
    """Convert an argument to a number."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f'must be a whole number from {least}, got {text!r}')
    return int(text)


async def _run(rounds: Sequence[range], *, ranks: str | None, at_once: int) -> int:
    """Run rounds with kills, of the mesh plan named `ranks` or, by default, of a single process."""
    begin = time.monotonic()
    mesh = None if ranks is None else MESH_PLANS[ranks]
    is_on_ray = mesh is not None and mesh.is_on_ray
    # The loss of a node must not affect another round's service.
    slots = asyncio.Semaphore(1 if is_on_ray else at_once)
    with tempfile.TemporaryDirectory(prefix='twinkle-faults-') as name:
        folder = Path(name)
        model_dir = build_tiny_model(folder / 'tiny')
        async with (
            open_environment(folder, model_dir, is_on_ray=is_on_ray) as environment,
            running_harness(
                environment.model('undisturbed') if mesh is None else environment.mesh('undisturbed', mesh)
            ) as undisturbed,
        ):
            oracle = Oracle(undisturbed)

            async def run_one(seeds: range) -> RoundReport:
                number = round_of(seeds[0])
                kills = kills_of(number) if mesh is None else rank_kills_of(number, is_on_ray=is_on_ray)
                async with slots:
                    report = await run_round(environment, oracle, seeds, kills, mesh=mesh)
                _print(_progress(seeds, report, time.monotonic() - begin, ranks=ranks))
                return report

            reports = await asyncio.gather(*map(run_one, rounds))
    return _print_summary(rounds, reports, is_mesh=mesh is not None)


async def _run_transfers(seeds: range) -> int:
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix='twinkle-faults-') as folder:
        report = await TransferHarness(Path(folder)).run(_counted(seeds))
    for seed, lines in report.violations.items():
        _print('\n'.join([f'VIOLATION, reproduce with ./run faults --transfers --seed {seed}:', *lines]))
    _print(f'violations: {report}; {len(seeds)} seeds, {time.monotonic() - begin:.0f} s')
    return 1 if report.violations else 0


def _run_gateway(seeds: range) -> int:
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix='twinkle-faults-') as folder:
        report = run_seeds(Path(folder), _counted(seeds))
    for seed, line in report.violations.items():
        _print(f'VIOLATION, reproduce with ./run faults --gateway --seed {seed}:\n    {line}')
    _print(f'violations: {report}; {time.monotonic() - begin:.0f} s')
    return 1 if report.violations else 0


def _counted(seeds: range) -> Iterator[int]:
    """Yield the seeds, and print the progress after every tenth one."""
    begin = time.monotonic()
    for count, seed in enumerate(seeds):
        if count and count % 10 == 0:
            _print(f'{count} of {len(seeds)} seeds, {time.monotonic() - begin:.0f} s')
        yield seed


def _progress(seeds: range, report: RoundReport, seconds: float, *, ranks: str | None) -> str:
    deaths = ', '.join(map(str, report.deaths))
    size = f'{report.operation_count} operations, {report.fault_count} faults, {len(report.deaths)} kills ({deaths})'
    lines = [f'seeds {seeds[0]}-{seeds[-1]}: {size}, {len(report.violations)} seeds with violations, {seconds:.0f} s']
    not_reached = report.planned_kills[len(report.deaths) :]
    if not_reached:
        lines.append(f'  not reached: {", ".join(map(str, not_reached))}')
    for seed, found in report.violations.items():
        lines.append(f'  VIOLATION, reproduce with ./run faults {f"--ranks {ranks} " if ranks else ""}--seed {seed}:')
        lines += [f'    {line}' for line in found[:_MAX_LINES]]
        if len(found) > _MAX_LINES:
            lines.append(f'    and {len(found) - _MAX_LINES} more')
    return '\n'.join(lines)


def _print_summary(rounds: Sequence[range], reports: Sequence[RoundReport], *, is_mesh: bool) -> int:
    violation_count = sum(len(report.violations) for report in reports)
    deaths = [kill for report in reports for kill in report.deaths]
    kills = f'{len(deaths)} kills, {sum(report.checkpoint_deaths for report in reports)} of the checkpoint service'
    if not is_mesh:
        counts = count_kills(deaths)
        reached = sum(1 for count in counts.values() if count)
        covered = ', '.join(f'{name} {count}' for name, count in counts.items())
        kills += f', failpoints covered: {reached} of {len(counts)} ({covered})'
    _print(f'violations: {violation_count} of {sum(map(len, rounds))} seeds, {kills}')
    return 1 if violation_count else 0


def _print(text: str) -> None:
    sys.stdout.write(text + '\n')
    sys.stdout.flush()


if __name__ == '__main__':
    sys.exit(main())
