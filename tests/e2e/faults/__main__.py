"""`./run faults [N] [--seed S] [--transfers | --gateway]`: N seeds of faults, and a count of violations.

Against the model service, or with `--transfers` against weights on their way to samplers, or with `--gateway`
against the gateway under a program of the Tinker SDK.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from e2e.faults.gateway import run_seeds
from e2e.faults.rounds import Oracle, RoundReport, run_round, serving, setting_in
from e2e.faults.schedule import covered, kills_of, round_of, seeds_of
from e2e.faults.transfers import Stand
from fixtures.tiny_model import build_tiny_model

_LINES_SHOWN = 6
_AT_ONCE = min(2, os.cpu_count() or 1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; return 1 where there was a violation."""
    parser = argparse.ArgumentParser(prog='./run faults', description=__doc__)
    parser.add_argument('count', nargs='?', type=int, default=100, help='seeds; 100 by default')
    parser.add_argument('--seed', type=int, help='run the round of this seed alone')
    parser.add_argument('--at-once', type=int, default=_AT_ONCE, help='rounds at the same time; one for each core')
    parser.add_argument('--transfers', action='store_true', help='kill what weights pass through on their way instead')
    parser.add_argument('--gateway', action='store_true', help='kill the gateway under a Tinker program instead')
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
    return asyncio.run(_run(list(rounds), at_once=options.at_once))


async def _run(rounds: Sequence[range], *, at_once: int) -> int:
    begin = time.monotonic()
    places = asyncio.Semaphore(at_once)
    with tempfile.TemporaryDirectory(prefix='twinkle-faults-') as name:
        folder = Path(name)
        model_dir = build_tiny_model(folder / 'tiny')
        async with setting_in(folder, model_dir) as setting, serving(setting.model('undisturbed')) as undisturbed:
            oracle = Oracle(undisturbed)

            async def run_one(seeds: range) -> RoundReport:
                async with places:
                    report = await run_round(setting, oracle, seeds, kills_of(round_of(seeds[0])))
                _say(_progress(seeds, report, time.monotonic() - begin))
                return report

            reports = await asyncio.gather(*map(run_one, rounds))
    return _conclude(rounds, reports)


async def _run_transfers(seeds: range) -> int:
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix='twinkle-faults-') as folder:
        report = await Stand(Path(folder)).run(seeds)
    for seed, lines in report.violations.items():
        _say('\n'.join([f'VIOLATION, reproduce with ./run faults --transfers --seed {seed}:', *lines]))
    _say(f'violations: {report}; {len(seeds)} seeds, {time.monotonic() - begin:.0f} s')
    return 1 if report.violations else 0


def _run_gateway(seeds: range) -> int:
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix='twinkle-faults-') as folder:
        report = run_seeds(Path(folder), seeds)
    for seed, line in report.violations.items():
        _say(f'VIOLATION, reproduce with ./run faults --gateway --seed {seed}:\n    {line}')
    _say(f'violations: {report}; {time.monotonic() - begin:.0f} s')
    return 1 if report.violations else 0


def _progress(seeds: range, report: RoundReport, seconds: float) -> str:
    deaths = ', '.join(map(str, report.deaths))
    size = f'{report.operation_count} operations, {report.fault_count} faults, {len(report.deaths)} kills ({deaths})'
    lines = [f'seeds {seeds[0]}-{seeds[-1]}: {size}, {len(report.violations)} seeds with violations, {seconds:.0f} s']
    not_reached = report.planned_kills[len(report.deaths) :]
    if not_reached:
        lines.append(f'  not reached: {", ".join(map(str, not_reached))}')
    for seed, found in report.violations.items():
        lines.append(f'  VIOLATION, reproduce with ./run faults --seed {seed}:')
        lines += [f'    {line}' for line in found[:_LINES_SHOWN]]
        if len(found) > _LINES_SHOWN:
            lines.append(f'    and {len(found) - _LINES_SHOWN} more')
    return '\n'.join(lines)


def _conclude(rounds: Sequence[range], reports: Sequence[RoundReport]) -> int:
    bad = sum(len(report.violations) for report in reports)
    deaths = [kill for report in reports for kill in report.deaths]
    places = covered(deaths)
    reached = sum(1 for count in places.values() if count)
    _say(
        f'violations: {bad} of {sum(map(len, rounds))} seeds, {len(deaths)} kills, '
        f'{sum(report.checkpoint_deaths for report in reports)} of the checkpoint service, '
        f'failpoints covered: {reached} of {len(places)} '
        f'({", ".join(f"{name} {count}" for name, count in places.items())})'
    )
    return 1 if bad else 0


def _say(text: str) -> None:
    sys.stdout.write(text + '\n')
    sys.stdout.flush()


if __name__ == '__main__':
    sys.exit(main())
