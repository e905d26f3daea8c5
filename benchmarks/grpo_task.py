"""The task of the GRPO benchmark, on which both programs train: prompts, and a reward for completions."""

import random
from collections.abc import Mapping
from typing import Any

from transformers import AutoTokenizer

_WORDS = ('one', 'two', 'three', 'four', 'five', 'red', 'green', 'blue', 'north', 'south', 'east', 'west', 'tree')
_PROMPTS = 64


def prompts_of(folder: str, options: Mapping[str, Any]) -> list[str]:
    """Return random prompts of about `options['prompt_tokens']` tokens for the tokenizer in `folder`."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    words = random.Random(0)
    prompts: list[str] = []
    for _ in range(_PROMPTS):
        text = ' '.join(words.choices(_WORDS, k=options['prompt_tokens']))
        prompts.append(tokenizer.decode(tokenizer(text)['input_ids'][: options['prompt_tokens']]))
    return prompts


def reward_of(completion: str) -> float:
    """Return the fraction of letters `e` in a completion. It varies between the completions of a prompt."""
    return completion.count('e') / max(1, len(completion))
