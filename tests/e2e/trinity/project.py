"""A project of Trinity-RFT: its folder, its processes and its records."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from e2e.trinity.cluster import running_ray
from fixtures.source_tree import ROOT

_RUN_SECONDS = 400.0
"""Time limit of a run. A run takes a minute on two idle cores, most of it for the start of Trinity's actors."""
_LOG_CHARACTERS = 8000
"""Maximum length of a log in the message of a failed run."""
_CONFIG = ROOT / 'tests' / 'e2e' / 'trinity' / 'config.yaml'
_OTHER_SETTINGS = ('TINKER_', 'TRINITY_', 'RAY_', 'HF_', 'WANDB_')
"""Prefixes of the user's environment variables that a run does not inherit."""

Metrics = dict[str, float]
"""Metrics of one step, by name."""


class RunFailedError(Exception):
    """A run did not reach its last step."""


def installed_trinity() -> Path:
    """Return the folder in which Trinity is installed.

    Raises:
        FileNotFoundError: Trinity is not installed.
    """
    folder = Path(sys.prefix) / 'trinity'
    if not (folder / '.installed').is_file():
        raise FileNotFoundError(f'{folder}: ./run test --all and ./run e2e install Trinity-RFT there')
    return folder


@dataclass(frozen=True)
class Project:
    """A project that trains `base_model`; call `prepare` first."""

    folder: Path
    """Working folder of all processes."""
    base_model: str
    """Name of the base model at the gateway."""
    gateway: Mapping[str, str]
    """Address and key of the gateway: `base_url` and `api_key`."""

    @property
    def job(self) -> Path:
        """Folder in which Trinity writes logs and the paths of checkpoints."""
        return self.folder / 'checkpoints' / 'twinkle' / 'e2e' / 'tiny'

    def prepare(self, tokenizer: Path) -> None:
        """Write the tasks, and link the tokenizer under the name by which Trinity and the SDK load it."""
        link = self.folder / self.base_model
        link.parent.mkdir(parents=True)
        link.symlink_to(tokenizer)
        tasks = self.folder / 'tasks'
        tasks.mkdir()
        rows = [json.dumps({'question': f'Write {number}', 'answer': str(number)}) for number in range(64)]
        (tasks / 'train.jsonl').write_text('\n'.join(rows) + '\n', encoding='utf-8')

    def run(self, *, total_steps: int) -> dict[int, Metrics]:
        """Run explorer and trainer on a new Ray cluster; return the trainer's metrics for each step of this run.

        Raises:
            FileNotFoundError: Trinity is not installed.
            RunFailedError: The command failed, or the trainer did not reach `total_steps`; the message contains the end
                of the output.
        """
        log = self.job / 'log' / 'trainer.log'
        begin = log.stat().st_size if log.exists() else 0
        environment = self._environment(total_steps)
        output = self.folder / f'output-{total_steps}.log'
        with running_ray(environment, self.folder) as address, output.open('wb') as stream:
            status = self._launch({**environment, 'RAY_ADDRESS': address}, stream)
        steps = _read_metrics(log.read_bytes()[begin:].decode()) if log.exists() else {}
        # Trinity exits with status 0 even if the explorer or the trainer failed.
        if status != 0 or max(steps, default=0) != total_steps:
            end = output.read_text(encoding='utf-8', errors='replace')[-_LOG_CHARACTERS:]
            raise RunFailedError(f'status {status}, steps {list(steps)}; {output} ends with:\n{end}')
        return steps

    def saved_path(self, step: int, kind: str) -> str:
        """Return the `tinker://` path that Trinity recorded; `kind` is 'checkpoint' or 'sampler'."""
        return (self.job / f'global_step_{step}' / f'remote_{kind}_path.txt').read_text(encoding='utf-8').strip()

    def _launch(self, environment: Mapping[str, str], output: BinaryIO) -> int | None:
        """Run Trinity's command; return its exit status, or None if it exceeded the time limit."""
        command = [sys.executable, '-m', 'trinity.cli.launcher', 'run', '--config', str(_CONFIG)]
        try:
            done = subprocess.run(
                command,
                env=environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=_RUN_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None
        return done.returncode

    def _environment(self, total_steps: int) -> dict[str, str]:
        """Return the user's environment, with the project's settings in place of the user's for these programs."""
        trinity = installed_trinity()
        inherited = {name: text for name, text in os.environ.items() if not name.startswith(_OTHER_SETTINGS)}
        return {
            **inherited,
            'HOME': str(self.folder),
            'PATH': os.pathsep.join([str(trinity / 'bin'), inherited.get('PATH', os.defpath)]),
            'PYTHONPATH': str(trinity),
            'OMP_NUM_THREADS': '1',
            'HF_HUB_OFFLINE': '1',
            'TRANSFORMERS_OFFLINE': '1',
            'RAY_USAGE_STATS_ENABLED': '0',
            # Ray stops actors when the machine has little memory, even if other programs use the memory.
            'RAY_memory_monitor_refresh_ms': '0',
            # By default, Ray lowers the priority of actors, so that other tests would delay them.
            'RAY_worker_niceness': '0',
            'TINKER_BASE_URL': self.gateway['base_url'],
            'TINKER_API_KEY': self.gateway['api_key'],
            'TRINITY_API_KEY': self.gateway['api_key'],
            'TRINITY_CHECKPOINTS': str(self.folder / 'checkpoints'),
            'TRINITY_MODEL': self.base_model,
            'TRINITY_TASKS': str(self.folder / 'tasks'),
            'TRINITY_STEPS': str(total_steps),
        }


def _read_metrics(log: str) -> dict[int, Metrics]:
    """Return the metrics of each step from a log with lines such as `Step 1: {'loss:sum': 0.25, ...}`."""
    steps: dict[int, Metrics] = {}
    for step, line in re.findall(r'Step (\d+): \{(.*)\}', log):
        steps[int(step)] = {name: float(text) for name, text in re.findall(r"'([^']+)': ([^,]+)", line)}
    return steps
