"""Time of a whole GRPO iteration (publish, sample, reward, learn) through the Tinker SDK, against TRL's GRPOTrainer.

Both programs train a LoRA adapter of the same base model on the same prompts, without a KL term. TRL runs in a separate
process and samples with transformers. Iterations of TRL and of the stack alternate.
`./run bench grpo --help` lists the options.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import tinker
from transformers import AutoTokenizer

from benchmarks.grpo_task import prompts_of, reward_of
from benchmarks.local_stack import default_device, running_stack
from benchmarks.processes import busy_seconds, with_children
from benchmarks.timing import ratio_by_round, time_alternately
from twinkle.advantage import GRPOAdvantage
from twinkle.hub import resolve_model
from twinkle_client.stack import StackState
from twinkle_client.stack.options import DEFAULT_MODEL

_ROOT = Path(__file__).parents[1]
_TRL = Path(sys.prefix) / 'trl'
"""Folder in which `./run bench grpo` installs TRL."""


def main(arguments: Sequence[str] = ()) -> dict[str, Any]:
    """Run the comparison and return its figures."""
    options = _parse(arguments)
    settings = {**vars(options), 'folder': str(resolve_model(options.model))}
    with (
        running_stack(
            options.model,
            engine=options.engine,
            dtype=options.dtype,
            threads=options.threads,
            services={'model': {'device': options.device}},
        ) as stack,
        _Ours(stack, settings) as ours,
        _running_trl(settings) as trl,
    ):
        processes = {'client': os.getpid(), 'trl': trl.pid, **{service.name: service.pid for service in stack.services}}
        before = _cpu_seconds(processes)
        clock = (lambda: sum(_cpu_seconds(processes).values())) if options.cpu_seconds else time.perf_counter
        times = time_alternately({'ours': ours.iterate, 'trl': trl.iterate}, rounds=options.rounds, clock=clock)
        after = _cpu_seconds(processes)
    iterations = options.rounds + 1
    return {
        'options': vars(options),
        'trl_over_ours': ratio_by_round(times['trl'], times['ours']),
        'goal': '>= 3.5',
        'sampled_tokens_per_iteration': {
            'ours': round(ours.token_count / iterations, 1),
            'trl': round(trl.token_count / iterations, 1),
        },
        'seconds_of_our_parts': {name: round(seconds / iterations, 3) for name, seconds in ours.seconds.items()},
        'cpu_seconds_per_iteration': {name: round((after[name] - before[name]) / iterations, 3) for name in after},
        **{name: spread.as_figures() for name, spread in times.items()},
    }


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog='./run bench grpo')
    parser.add_argument('--model', default=DEFAULT_MODEL, help='hub id, alias or folder')
    parser.add_argument('--prompts', type=int, default=2, help='prompts per iteration')
    parser.add_argument('--completions', type=int, default=8, help='completions per prompt')
    parser.add_argument('--prompt-tokens', type=int, default=48)
    parser.add_argument('--new-tokens', type=int, default=10, help='maximum number of tokens per completion')
    parser.add_argument('--lora-rank', type=int, default=16)
    parser.add_argument('--learning-rate', type=float, default=1e-4)
    parser.add_argument('--engine', default='auto', help='sampling engine: auto, vllm or torch')
    parser.add_argument('--dtype', default='float32', choices=('float32', 'bfloat16'), help='data type on both sides')
    parser.add_argument('--device', default=default_device(), help='device of both programs')
    parser.add_argument('--threads', type=int, default=1)
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument(
        '--cpu-seconds',
        action='store_true',
        help='compare CPU time instead of wall time, for a machine with other work',
    )
    return parser.parse_args(arguments)


class _Ours:
    """The training loop of a user of the Tinker SDK."""

    def __init__(self, stack: StackState, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._tokenizer = AutoTokenizer.from_pretrained(settings['folder'])
        self._prompts = [self._tokenizer(text)['input_ids'] for text in prompts_of(settings['folder'], settings)]
        self._client = tinker.ServiceClient(base_url=stack.http_url, api_key=stack.read_api_key())
        self._model = self._client.create_lora_training_client(stack.base_model, rank=settings['lora_rank']).result()
        self._position = 0
        self.token_count = 0
        self.seconds = {'publish': 0.0, 'sample': 0.0, 'learn': 0.0}
        """Wall time of each part over all iterations."""

    def __enter__(self) -> '_Ours':
        self._client.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._client.__exit__(*raised)

    def iterate(self) -> None:
        """Publish the adapter, sample a group for each prompt, and take one step on all samples."""
        with self._timed('publish'):
            sampler = self._model.save_weights_and_get_sampling_client().result()
        with self._timed('sample'):
            prompts = [self._prompts[(self._position + index) % len(self._prompts)] for index in range(self._count)]
            self._position += self._count
            calls = [self._sample(sampler, prompt) for prompt in prompts]
            groups = [call.result().sequences for call in calls]
        with self._timed('learn'):
            data = self._examples(prompts, groups)
            backward = self._model.forward_backward(data, 'importance_sampling')
            step = self._model.optim_step(tinker.AdamParams(learning_rate=self._settings['learning_rate']))
            backward.result()
            step.result()

    @property
    def _count(self) -> int:
        return self._settings['prompts']

    def _sample(self, sampler: tinker.SamplingClient, prompt: list[int]) -> Any:
        params = tinker.SamplingParams(max_tokens=self._settings['new_tokens'], temperature=1.0)
        return sampler.sample(
            tinker.ModelInput.from_ints(prompt), num_samples=self._settings['completions'], sampling_params=params
        )

    def _examples(self, prompts: list[list[int]], groups: list[Any]) -> list[tinker.Datum]:
        """Return an example per sample, with its advantage within its group at each sampled token."""
        examples: list[tinker.Datum] = []
        for prompt, group in zip(prompts, groups, strict=True):
            rewards = [reward_of(self._tokenizer.decode(sequence.tokens)) for sequence in group]
            advantages = GRPOAdvantage()(rewards, num_generations=len(group), scale='group').tolist()
            for sequence, advantage in zip(group, advantages, strict=True):
                self.token_count += len(sequence.tokens)
                examples.append(_datum(prompt, sequence, advantage))
        return examples

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.seconds[part] += time.perf_counter() - begin


def _datum(prompt: list[int], sequence: Any, advantage: float) -> tinker.Datum:
    tokens = [*prompt, *sequence.tokens]
    before = len(prompt) - 1
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            'target_tokens': tokens[1:],
            'logprobs': np.concatenate([np.zeros(before), sequence.logprobs]).astype(np.float32),
            'advantages': np.concatenate([np.zeros(before), np.full(len(sequence.tokens), advantage)]).astype(
                np.float32
            ),
        },
    )


class _Trl:
    """The process of TRL, which runs one iteration when it receives a line."""

    def __init__(self, process: 'subprocess.Popen[str]') -> None:
        self._process = process
        self.pid = process.pid
        self.token_count = 0
        self._wait()

    def iterate(self) -> None:
        """Run one iteration."""
        assert self._process.stdin is not None
        self._process.stdin.write('\n')
        self._process.stdin.flush()
        self._wait()

    def _wait(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith('{"token_count"'):
                self.token_count += json.loads(line)['token_count']
                return
        raise RuntimeError(f'TRL ended with status {self._process.wait()}; its errors are above')


@contextmanager
def _running_trl(settings: dict[str, Any]) -> Iterator[_Trl]:
    if not _TRL.is_dir():
        raise RuntimeError(f'{_TRL} does not exist: start this benchmark with ./run bench grpo, which installs TRL')
    paths = os.pathsep.join(map(str, (_TRL, _ROOT / 'sdk/python', _ROOT)))
    process = subprocess.Popen(
        # TRL warns about the version of vLLM, although it does not use vLLM here.
        [sys.executable, '-W', 'ignore', '-m', 'benchmarks.trl_worker', json.dumps(settings)],
        cwd=_ROOT,
        env={**os.environ, 'PYTHONPATH': paths, 'OMP_NUM_THREADS': str(settings['threads'])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield _Trl(process)
    finally:
        process.kill()
        process.communicate()


def _cpu_seconds(processes: Mapping[str, int]) -> dict[str, float]:
    """Return the CPU time in seconds of each process and its descendants. The client's descendants are excluded."""
    return {
        name: busy_seconds([psutil.Process(pid)] if name == 'client' else with_children(pid))
        for name, pid in processes.items()
    }
