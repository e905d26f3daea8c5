"""Memory of active, idle and parked adapters, including many more adapters than fit into memory."""

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.standalone_model import StandaloneAdapter, StandaloneModel, random_batch, running_model
from twinkle.hub import resolve_model

_MOMENTS = 2
"""Number of values that AdamW stores per parameter."""
_FLOAT_BYTES = 4
_PARKING_SECONDS = 60.0
"""Time for which the memory is measured while the service parks all adapters."""
_POLL_SECONDS = 0.5
_CURVE_POINTS = 10
"""Number of measurements of the memory while the adapters are trained."""


def main(arguments: Sequence[str] = ()) -> dict[str, Any]:
    """Run the measurements and return their figures."""
    parser = argparse.ArgumentParser(prog='./run bench adapter_memory')
    parser.add_argument('--model', default='smollm2-135m-instruct', help='hub id, alias or folder')
    parser.add_argument('--adapters', type=int, default=16, help='number of adapters in memory')
    parser.add_argument('--lora-rank', type=int, default=16)
    parser.add_argument('--turns', type=int, default=30, help='number of operations that restore a parked adapter')
    parser.add_argument(
        '--many', type=int, default=1000, help='number of adapters with rank 1 that are parked; 0 skips this part'
    )
    parser.add_argument('--resident', type=int, default=16, help='maximum number of adapters in memory, with --many')
    options = parser.parse_args(arguments)
    base_model = str(resolve_model(options.model))
    figures: dict[str, Any] = {'options': vars(options), 'held': _memory_growth(base_model, options)}
    figures['unparked'] = _restore_times(base_model, options)
    if options.many:
        figures['many'] = _park_many(base_model, options)
    return figures


def _memory_growth(base_model: str, options: argparse.Namespace) -> dict[str, Any]:
    """Compare the growth of the service's memory with the size of parameters and optimizer moments."""
    batch = random_batch(examples=1, length=16, vocabulary=300)
    idle_seconds = 3600.0
    with running_model(base_model, idle_seconds=idle_seconds, max_resident_adapters=options.adapters + 1) as model:
        warm = model.create(lora_rank=options.lora_rank)
        _train(warm, batch)
        begin = model.resident_bytes
        adapters = [model.create(lora_rank=options.lora_rank, seed=seed) for seed in range(options.adapters)]
        created = model.resident_bytes
        for adapter in adapters:
            adapter.forward_backward(batch)
        active = model.resident_bytes
        for adapter in adapters:
            adapter.step()
        idle = model.resident_bytes
    parameters = adapters[0].parameter_count * _FLOAT_BYTES
    state = parameters * (1 + _MOMENTS)
    grown = {'fresh': created - begin, 'with_gradient': active - begin, 'idle_after_step': idle - begin}
    return {
        'parameter_mib': round(parameters / 2**20, 2),
        'parameters_and_optimizer_mib': round(state / 2**20, 2),
        'mib_each': {name: round(size / len(adapters) / 2**20, 2) for name, size in grown.items()},
        'idle_over_parameters_and_optimizer': round(grown['idle_after_step'] / len(adapters) / state, 3),
        'goal_idle': '<= 1.2',
    }


def _restore_times(base_model: str, options: argparse.Namespace) -> dict[str, Any]:
    """Compare a forward_backward that first restores its adapter from disk with one on an adapter in memory."""
    batch = random_batch(examples=1, length=16, vocabulary=300)
    with running_model(base_model, max_resident_adapters=2, undo_steps=0) as model:
        adapters = [model.create(lora_rank=options.lora_rank, seed=seed) for seed in range(3)]
        for adapter in adapters:
            _train(adapter, batch)
        times: dict[str, list[float]] = {'resident': [], 'parked': []}
        for turn in range(options.turns):
            # Two of the three adapters fit into memory, so the least recently used adapter is on disk.
            adapter = adapters[turn % len(adapters)]
            for where in ('parked', 'resident'):
                begin = time.monotonic()
                adapter.forward_backward(batch)
                times[where].append(time.monotonic() - begin)
    medians = {where: statistics.median(values) for where, values in times.items()}
    return {
        'milliseconds': {where: round(seconds * 1000, 1) for where, seconds in medians.items()},
        'parked_over_resident': round(medians['parked'] / medians['resident'], 2),
    }


def _park_many(base_model: str, options: argparse.Namespace) -> dict[str, Any]:
    """Create many more adapters than fit into memory, and train each once, so that each is restored and parked."""
    batch = random_batch(examples=1, length=16, vocabulary=300)
    settings = {'max_resident_adapters': options.resident, 'idle_seconds': 5.0, 'undo_steps': 0}
    with running_model(base_model, **settings) as model:
        warm = model.create(lora_rank=1)
        _train(warm, batch)
        begin = model.resident_bytes
        clock = time.monotonic()
        curve: list[dict[str, float]] = []
        adapters = [model.create(lora_rank=1, seed=seed) for seed in range(options.many)]
        created = time.monotonic() - clock
        curve.append(_point(model, 0, begin))
        for count, adapter in enumerate(adapters, start=1):
            _train(adapter, batch)
            if count % max(1, options.many // _CURVE_POINTS) == 0:
                curve.append(_point(model, count, begin))
        stepped = time.monotonic() - clock - created
        all_parked = _min_memory_within(model, _PARKING_SECONDS)
    state = adapters[0].parameter_count * _FLOAT_BYTES * (1 + _MOMENTS)
    return {
        'adapters': options.many,
        'parameters_and_optimizer_kib_each': round(state / 2**10, 1),
        'seconds_to_create_each': round(created / options.many, 4),
        'seconds_to_step_each': round(stepped / options.many, 4),
        'resident_mib_grown': curve,
        'resident_kib_each_once_all_are_paged': round((all_parked - begin) / options.many / 2**10, 1),
    }


def _train(adapter: StandaloneAdapter, batch: Any) -> None:
    adapter.forward_backward(batch)
    adapter.step()


def _point(model: StandaloneModel, count: int, begin: int) -> dict[str, float]:
    return {'stepped': count, 'mib': round((model.resident_bytes - begin) / 2**20, 1)}


def _min_memory_within(model: StandaloneModel, seconds: float) -> int:
    """Return the minimum resident memory within `seconds`, while the service parks idle adapters."""
    end = time.monotonic() + seconds
    minimum = model.resident_bytes
    while time.monotonic() < end:
        time.sleep(_POLL_SECONDS)
        minimum = min(minimum, model.resident_bytes)
    return minimum
