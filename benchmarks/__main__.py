"""Runs benchmarks and prints one JSON document: `python -m benchmarks [NAME ...]`.

Each benchmark is a module of this package whose `main` returns its figures. If one fails, its error is reported instead
of its figures, the others still run, and the exit status is 1.
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
    'mutual_tls': 'time of a unary call between services over mutual TLS, compared with plaintext',
    'checkpoint_stream': 'bytes per second through the checkpoint service',
    'weight_transports': 'bytes per second of a fetch as bytes, over gloo, and in shared memory',
    'transports': 'throughput of weight streams, compared with uvicorn + httpx and ZeroMQ',
    'wire_bytes': 'size of deltas, compared with raw bf16, in a real run of fifty steps',
    'publish_to_live': 'time until a vLLM sampler uses a published version, compared with a folder that vLLM loads',
    'publish_while_sampling': 'gaps in streams while versions are published; takes options',
    'sampling_throughput': 'tokens per second through the gateway, compared with the same vLLM engine in process',
    'tinker_load': 'the Tinker API with a different number of clients per tenant: times, shares, memory; takes options',
    'fleet': 'tokens per second of one, two and four samplers, and the gap in a stream after its sampler is killed',
    'start_and_memory': 'time from `up` to the first token, and memory per service',
    'lora_kernel': 'time of shared training passes, compared with separate passes and with transformers + peft',
    'train_throughput': 'trained tokens per second, compared with transformers + peft on the same batches',
    'peers': 'training and sampling through the Tinker SDK, compared with peft and HF generate; takes options',
    'co_batch': 'time of training adapters in shared passes, compared with separate passes; takes options',
    'shared_prompts': 'time of training groups with common prompts, compared with separate rows; takes options',
    'grpo': 'time of a whole GRPO iteration through the Tinker SDK, compared with TRL; takes options',
    'long_operations': 'delay of another tenant by operations of 12,000 tokens, in passes; takes options',
    'journal_overhead': 'time of steps through the model service with and without its journal; takes options',
    'churn': 'memory, threads, descriptors and disk while adapters and clients start and end; takes options',
    'adapter_memory': 'memory of active, idle and parked adapters, and of a thousand adapters; takes options',
    'scale': 'control operations and memory with 10, 100 and 1,000 adapters; takes options',
    'table': 'a table of ratios for the documentation; runs several benchmarks above; takes options',
}
"""Modules and descriptions of the benchmarks, in the order in which they run."""

WITH_OPTIONS = (
    'adapter_memory',
    'churn',
    'co_batch',
    'grpo',
    'journal_overhead',
    'long_operations',
    'peers',
    'publish_while_sampling',
    'scale',
    'shared_prompts',
    'table',
    'tinker_load',
)
"""Benchmarks with options, such as `python -m benchmarks co_batch --adapters 8 32`.

If the first word is one of these names, only this benchmark runs, and all other words are its options.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the named benchmarks, or all benchmarks except `table`; return the exit status."""
    listing = '\n'.join(f'  {name:23} {purpose}' for name, purpose in BENCHMARKS.items())
    parser = argparse.ArgumentParser(
        prog='python -m benchmarks',
        description='Prints one JSON document with the figures and the hardware.',
        epilog=f'benchmarks:\n{listing}',
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument('names', nargs='*', metavar='NAME', help='benchmark to run; default: all except table')
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] in WITH_OPTIONS:
        names, options = words[:1], words[1:]
    else:
        names, options = parser.parse_args(words).names or [name for name in BENCHMARKS if name != 'table'], []
    if unknown := [name for name in names if name not in BENCHMARKS]:
        parser.error(f'unknown benchmark {", ".join(unknown)}; the benchmarks are {", ".join(BENCHMARKS)}')
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
    except Exception as error:  # noqa: BLE001 (a failed benchmark must not discard the figures of the others)
        traceback.print_exc()
        figures = {'error': f'{type(error).__name__}: {error}'}
    return {**figures, 'benchmark_seconds': round(time.perf_counter() - begin, 1)}


if __name__ == '__main__':
    sys.exit(main())
