"""Working directory and environment variables of the recipes, with local files that replace a hub."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from e2e.cookbook.corpus import write_corpus
from e2e.cookbook.recipes import MODEL
from twinkle.hub import resolve_tokenizer
from twinkle_client.stack import StackState

_STOP_SECONDS = 10.0
"""Time in seconds after which a terminated process is killed."""
_EXAMPLES = 'tinker_cookbook/example_data/conversations.jsonl'
"""Example conversations inside the installation of tinker-cookbook."""


@dataclass(frozen=True)
class ProcessResult:
    """Result of a recipe's process."""

    status: int | None
    """Exit status; None if the process exceeded its time limit."""
    seconds: float


@dataclass(frozen=True)
class Environment:
    """Environment of the recipes; call `prepare` first."""

    folder: Path
    """Working directory of the recipes."""
    cookbook: Path
    """Folder in which tinker-cookbook is installed."""

    def prepare(self, *, small_model: str) -> None:
        """Write the datasets and the tokenizer of `small_model`; existing files are replaced."""
        source = resolve_tokenizer(small_model)
        # Recipes load the tokenizer by the alias; clients load it by the hub id that the gateway returns.
        for name in (MODEL, small_model):
            tokenizer = self.folder / name
            shutil.rmtree(tokenizer, ignore_errors=True)
            tokenizer.mkdir(parents=True)
            for path in source.iterdir():
                if path.suffix in {'.json', '.jinja'}:
                    shutil.copy(path, tokenizer)
        write_corpus(self.folder, conversations=256, problems=512, preferences=256, markets=128)
        shutil.copy(self.cookbook / _EXAMPLES, self.folder)

    def run(self, arguments: list[str], stack: StackState, log: Path, *, limit_seconds: float) -> ProcessResult:
        """Run a program of the cookbook with a stack, and write its output to `log`."""
        begin = time.monotonic()
        command = [sys.executable, '-u', '-m', *arguments]
        with (
            log.open('wb') as output,
            subprocess.Popen(
                command, cwd=self.folder, env=self._environment(stack), stdout=output, stderr=subprocess.STDOUT
            ) as process,
        ):
            try:
                status = process.wait(limit_seconds)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                _stop(process)
        return ProcessResult(status, time.monotonic() - begin)

    def _environment(self, stack: StackState) -> Mapping[str, str]:
        """Return the user's environment without variables of Tinker, Hugging Face and W&B, and with those of the stack.

        The stack's variables are its address and its key.
        """
        environment = {
            name: text for name, text in os.environ.items() if not name.startswith(('TINKER_', 'HF_', 'WANDB_'))
        }
        return {
            **environment,
            'HOME': str(self.folder),
            'HF_HUB_OFFLINE': '1',
            'TRANSFORMERS_OFFLINE': '1',
            'PYTHONPATH': str(self.cookbook),
            'TINKER_BASE_URL': f'http://{stack.http_address}',
            'TINKER_API_KEY': stack.read_api_key(),
        }


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
