"""GRPO iterations of TRL in a separate process: `python -m benchmarks.trl_worker OPTIONS`, where OPTIONS is JSON.

The process prints a line of JSON before each iteration, and then waits for a line of input.
"""

import importlib
import json
import sys
import tempfile
from typing import Any

import torch
from peft import LoraConfig
from transformers import TrainerCallback

from benchmarks.grpo_task import prompts_of, reward_of

_MAX_STEPS = 1_000_000


class _Gate(TrainerCallback):
    """Prints the number of tokens that the last step sampled, and waits for a line of input, before each step."""

    token_count = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Print the count, and wait for a line of input; the end of the input ends the process."""
        _print({'token_count': self.token_count})
        self.token_count = 0
        if not sys.stdin.readline():
            sys.exit()


def main() -> None:
    """Train until the input ends."""
    options = json.loads(sys.argv[1])
    torch.set_num_threads(options['threads'])
    # TRL is installed in a separate folder, so that it cannot be imported elsewhere.
    trl = importlib.import_module('trl')
    datasets = importlib.import_module('datasets')
    gate = _Gate()

    def reward(completions: list[str], completion_ids: list[list[int]], **others: Any) -> list[float]:
        gate.token_count += sum(map(len, completion_ids))
        return [reward_of(text) for text in completions]

    with tempfile.TemporaryDirectory(prefix='twinkle-bench-') as folder:
        trainer = trl.GRPOTrainer(
            options['folder'],
            reward_funcs=reward,
            args=trl.GRPOConfig(**_arguments(options, folder)),
            train_dataset=datasets.Dataset.from_list(
                [{'prompt': text} for text in prompts_of(options['folder'], options)]
            ),
            peft_config=LoraConfig(r=options['lora_rank'], lora_alpha=32, target_modules='all-linear'),
            callbacks=[gate],
        )
        trainer.train()


def _arguments(options: dict[str, Any], folder: str) -> dict[str, Any]:
    """Return the arguments of TRL's configuration, with one optimizer step per batch of samples and without logging."""
    return {
        'output_dir': folder,
        'per_device_train_batch_size': options['prompts'] * options['completions'],
        'num_generations': options['completions'],
        'max_completion_length': options['new_tokens'],
        'generation_kwargs': {'min_new_tokens': options['new_tokens']},
        'learning_rate': options['learning_rate'],
        'max_steps': _MAX_STEPS,
        'beta': 0.0,
        'bf16': options['dtype'] == 'bfloat16',
        'use_cpu': options['device'] == 'cpu',
        'gradient_checkpointing': False,
        'model_init_kwargs': {'dtype': options['dtype']},
        'report_to': 'none',
        'save_strategy': 'no',
        'logging_strategy': 'no',
        'disable_tqdm': True,
    }


def _print(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


if __name__ == '__main__':
    main()
