"""Model cards: the `README.md` of an adapter's folder, with the front matter that hubs read."""

from collections.abc import Mapping

import yaml

from twinkle.data_format import LoraConfig
from twinkle.hub import signed_card

_TARGETS_LIMIT = 20
"""Maximum number of target modules that a card lists."""


def adapter_card(
    config: LoraConfig, *, title: str, base_model: str, is_base_on_hub: bool, facts: Mapping[str, str]
) -> bytes:
    """Return the model card of an adapter in PEFT's format.

    Args:
        config: the adapter's configuration.
        title: heading of the card.
        base_model: name of the base model, without a prefix.
        is_base_on_hub: whether `base_model` is the name of a repository. Hubs refuse other names in the front matter.
        facts: further rows of the table, such as the number of steps.
    """
    front: dict[str, str | list[str]] = {'base_model': base_model} if is_base_on_hub else {}
    front |= {'library_name': 'peft', 'pipeline_tag': 'text-generation', 'tags': ['lora', 'peft', 'twinkle']}
    rows = {**facts, 'rank': str(config.r), 'alpha': f'{config.lora_alpha:g}', 'target modules': _targets(config)}
    table = ''.join(f'| {name} | {_cell(value)} |\n' for name, value in rows.items())
    link = f'[{base_model}](https://huggingface.co/{base_model})' if is_base_on_hub else f'`{base_model}`'
    text = (
        f'---\n{yaml.safe_dump(front, sort_keys=True)}---\n\n# {title}\n\n'
        f'A LoRA adapter of {link}, trained with Twinkle.\n\n| | |\n| --- | --- |\n{table}\n'
        f'## Load the adapter\n\n```python\n{_program(base_model, is_base_on_hub=is_base_on_hub)}```\n\n'
    )
    return signed_card(text)


def _program(base_model: str, *, is_base_on_hub: bool) -> str:
    """Return a program that loads the adapter and its tokenizer from the current folder."""
    source = repr(base_model)
    if is_base_on_hub:
        return (
            'from peft import AutoPeftModelForCausalLM\nfrom transformers import AutoTokenizer\n\n'
            "adapter = '.'  # this folder, or the id of its repository\n"
            'model = AutoPeftModelForCausalLM.from_pretrained(adapter)\n'
            f'tokenizer = AutoTokenizer.from_pretrained({source})\n'
        )
    return (
        'from peft import PeftModel\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n'
        "adapter = '.'  # this folder, or the id of its repository\n"
        f'base = {source}  # the folder or the repository of the base model\n'
        'model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)\n'
        'tokenizer = AutoTokenizer.from_pretrained(base)\n'
    )


def _targets(config: LoraConfig) -> str:
    given = config.target_modules
    names = [given] if isinstance(given, str) else list(given)
    more = f' and {len(names) - _TARGETS_LIMIT} more' if len(names) > _TARGETS_LIMIT else ''
    return ', '.join(names[:_TARGETS_LIMIT]) + more


def _cell(value: str) -> str:
    """Return a value as code in a cell of a table."""
    return f'`{value.replace("`", "").replace("|", "/")}`'
