"""Times of control operations, and memory of the services, with a growing number of adapters of a real model.

Each adapter is trained for one step and then idle, so that the model service writes its state to disk. The control
operations are measured after all states are on disk. The benchmark `adapter_memory` measures the adapters in memory.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.co_batch import TOKEN_IDS, random_feature
from benchmarks.local_stack import connected, default_device, running_stack
from twinkle.data_format import LoraConfig
from twinkle_client import TwinkleClient
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.stack import StackState
from twinkle_client.stack.options import DEFAULT_MODEL
from twinkle_client.stack.process_ids import resident_bytes

_TOGETHER = 8
"""Number of adapters that are trained concurrently."""
_IDLE_SECONDS = 5.0
"""Time after which the model service writes an idle adapter to disk."""
_PARKING_SECONDS = 45.0
"""Time for which the memory is measured while the service writes idle adapters to disk."""
_POLL_SECONDS = 0.5
_SERVICES = ('gateway', 'model')


def main(arguments: Sequence[str] = ()) -> dict[str, Any]:
    """Run the measurements and return their figures."""
    parser = argparse.ArgumentParser(prog='./run bench scale')
    parser.add_argument('--model', default=DEFAULT_MODEL, help='hub id, alias or folder')
    parser.add_argument('--device', default=default_device(), help='device of the trainer')
    parser.add_argument('--adapters', type=int, nargs='+', default=[10, 100, 1000], help='numbers of adapters')
    parser.add_argument('--lora-rank', type=int, default=1)
    parser.add_argument('--resident', type=int, default=16, help='maximum number of adapters in memory')
    parser.add_argument('--calls', type=int, default=200, help='number of calls of each control operation')
    options = parser.parse_args(arguments)
    settings = {'device': options.device, 'max_resident_adapters': options.resident, 'idle_seconds': _IDLE_SECONDS}
    with running_stack(options.model, services={'model': settings}) as state, connected(state) as client:
        model = MultiLoraTransformersModel(options.model, client=client)
        points = [_point(state, model, client, count, options) for count in sorted(options.adapters)]
    first, last = points[0], points[-1]
    added = last['adapters'] - first['adapters']
    return {
        'options': vars(options),
        'points': points,
        'p99_over_that_with_fewest_adapters': {
            name: round(times['p99_ms'] / first['operations'][name]['p99_ms'], 2)
            for name, times in last['operations'].items()
        },
        'goal_p99': '<= 1.5',
        'kib_of_each_idle_adapter': {
            name: round((last['resident_mib'][name] - first['resident_mib'][name]) * 1024 / max(added, 1), 1)
            for name in _SERVICES
        },
        'goal_kib': '<= 100',
    }


def _point(
    state: StackState, model: MultiLoraTransformersModel, client: TwinkleClient, count: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Create and train adapters until there are `count`, and measure the services."""
    begin, existing = time.monotonic(), len(client.list_adapters())
    for first in range(existing, count, _TOGETHER):
        _train(model, range(first, min(first + _TOGETHER, count)), options.lora_rank)
    trained = time.monotonic() - begin
    return {
        'adapters': count,
        'seconds_to_create_and_train_each': round(trained / max(count - existing, 1), 3),
        'resident_mib': _least_memory(state),
        'operations': _control_operations(model, client, options),
    }


def _train(model: MultiLoraTransformersModel, indexes: range, lora_rank: int) -> None:
    """Create adapters and train each for one step; their batches share passes."""
    names = [f'adapter-{index}' for index in indexes]
    for index, name in zip(indexes, names, strict=True):
        model.add_adapter_to_model(name, LoraConfig(r=lora_rank, seed=index))
    calls = [
        model.forward_backward.submit([random_feature(TOKEN_IDS, 16, index)], adapter_name=name, return_logps=False)
        for index, name in zip(indexes, names, strict=True)
    ]
    for call, name in zip(calls, names, strict=True):
        call.result()
        model.clip_grad_and_step(adapter_name=name)


def _least_memory(state: StackState) -> dict[str, float]:
    """Return the minimum resident memory of each service in MiB, while the model service writes adapters to disk."""
    pids = {service.name: service.pid for service in state.services if service.name in _SERVICES}
    least = {name: float('inf') for name in pids}
    end = time.monotonic() + _PARKING_SECONDS
    while time.monotonic() < end:
        least = {name: min(least[name], resident_bytes(pid) / 2**20) for name, pid in pids.items()}
        time.sleep(_POLL_SECONDS)
    return {name: round(mib, 1) for name, mib in least.items()}


def _control_operations(
    model: MultiLoraTransformersModel, client: TwinkleClient, options: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Call methods without computation in turn; return their times by name. A turn creates and deletes an adapter."""
    run_id = model.adapter_id('adapter-0')
    config = LoraConfig(r=options.lora_rank)
    operations: dict[str, Callable[[], Any]] = {
        'create_adapter': lambda: model.add_adapter_to_model('probe', config),
        'set_optimizer': lambda: model.set_optimizer('AdamW', lr=1e-4, adapter_name='probe'),
        'get_run': lambda: client.get_training_run(run_id),
        'get_operation': lambda: client.find_operation(run_id, 1),
        'get_server_info': client.get_server_info,
        'create_session': client.create_session,
        'delete_adapter': lambda: model.remove_adapter('probe'),
    }
    seconds: dict[str, list[float]] = {name: [] for name in operations}
    for _ in range(options.calls):
        for name, run in operations.items():
            begin = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - begin)
    return {name: _milliseconds(values) for name, values in seconds.items()}


def _milliseconds(seconds: Sequence[float]) -> dict[str, float]:
    p99 = statistics.quantiles(seconds, n=100, method='inclusive')[98]
    return {'p50_ms': round(statistics.median(seconds) * 1000, 2), 'p99_ms': round(p99 * 1000, 2)}
