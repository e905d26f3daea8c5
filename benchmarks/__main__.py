"""Runs benchmarks and prints one JSON document: `python -m benchmarks [NAME ...]`.

Each benchmark is a module of this package whose `main` returns its figures. One that fails is
reported in its place, and the others go on; the exit status tells that there was one.
"""

import argparse
import importlib
import json
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any

from benchmarks.hardware import describe_hardware

BENCHMARKS = {
    'gateway_hop': 'time that the gateway adds to a unary call',
    'mutual_tls': 'a unary call between services over mutual TLS, against plaintext',
    'checkpoint_stream': 'bytes per second through the checkpoint service',
    'transports': 'the stream of weights against uvicorn + httpx and ZeroMQ',
    'wire_bytes': 'deltas of a real run of fifty steps against raw bf16',
    'publish_to_live': 'a version from a trainer to a vLLM sampler, against a folder that the engine loads',
    'publish_while_sampling': 'gaps in streams while versions are published, in steps too; takes options',
    'sampling_throughput': 'tokens per second through the gateway, against the same vLLM engine in process',
    'tinker_load': 'the Tinker API under many clients of unequal tenants: times, shares, memory; takes options',
    'fleet': 'two samplers against one, and the gap in a stream whose sampler is killed',
    'start_and_memory': 'from `up` to the first token, and memory by service',
    'lora_kernel': 'the training pass: adapters together against alone, and against transformers + peft',
    'train_throughput': 'tokens per second trained, against a bare loop on the same batches',
    'co_batch': 'adapters trained together in one pass against one after the other; takes options',
    'journal_overhead': 'steps through the model service with its journal, against without',
    'adapter_memory': 'memory of active, idle and paged adapters, and a thousand of them',
}
"""Module to what it measures, in the order they run."""

WITH_OPTIONS = ('adapter_memory', 'co_batch', 'journal_overhead', 'publish_while_sampling', 'tinker_load')
"""Those that take options of their own: `python -m benchmarks co_batch --adapters 8 32`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the named benchmarks, or all; return the exit status."""
    listing = '\n'.join(f'  {name:23} {purpose}' for name, purpose in BENCHMARKS.items())
    parser = argparse.ArgumentParser(
        prog='python -m benchmarks',
        description='Prints one JSON document with the figures and the hardware.',
        epilog=f'benchmarks:\n{listing}',
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument('names', nargs='*', metavar='NAME', help='which to run; none: all')
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] in WITH_OPTIONS:
        names, options = given[:1], given[1:]
    else:
        names, options = parser.parse_args(given).names or list(BENCHMARKS), []
    if unknown := [name for name in names if name not in BENCHMARKS]:
        parser.error(f'no benchmark is called {", ".join(unknown)}; there are {", ".join(BENCHMARKS)}')
    document: dict[str, Any] = {'hardware': describe_hardware(), 'benchmarks': {}}
    for name in names:
        document['benchmarks'][name] = _run(name, options)
    print(json.dumps(document, indent=2))
    return 1 if any('error' in figures for figures in document['benchmarks'].values()) else 0


def _run(name: str, options: Sequence[str]) -> dict[str, Any]:
    print(f'benchmark: {name}: {BENCHMARKS[name]}', file=sys.stderr)
    begin = time.perf_counter()
    try:
        measure = importlib.import_module(f'benchmarks.{name}').main
        figures = measure(options) if name in WITH_OPTIONS else measure()
    except Exception as error:  # noqa: BLE001 (one that fails must not take the others' figures with it)
        traceback.print_exc()
        figures = {'error': f'{type(error).__name__}: {error}'}
    return {**figures, 'benchmark_seconds': round(time.perf_counter() - begin, 1)}


if __name__ == '__main__':
    sys.exit(main())
