"""Model cards: the `README.md` of an adapter's folder, with the front matter that hubs read."""

from collections.abc import Mapping

import yaml

from twinkle.data_format import LoraConfig
from twinkle.hub import public_name, repository_name, signed_card

_TARGETS_LIMIT = 20
"""Maximum number of target modules that a card lists."""


def adapter_card(config: LoraConfig, *, title: str, base_model: str, facts: Mapping[str, str]) -> bytes:
    """Return the model card of an adapter in PEFT's format.

    Args:
        config: the adapter's configuration.
        title: heading of the card.
        base_model: id or folder of the base model. A folder without a repository is named without its path, and only in
            the text, because hubs refuse such names in the front matter.
        facts: further rows of the table, such as the number of steps.
    """
    repository, name = repository_name(base_model), public_name(base_model)
    front: dict[str, str | list[str]] = {} if repository is None else {'base_model': repository}
    front |= {'library_name': 'peft', 'pipeline_tag': 'text-generation', 'tags': ['lora', 'peft', 'twinkle']}
    rows = {**facts, 'rank': str(config.r), 'alpha': f'{config.lora_alpha:g}', 'target modules': _targets(config)}
    table = ''.join(f'| {fact} | {_cell(value)} |\n' for fact, value in rows.items())
    link = f'`{name}`' if repository is None else f'[{name}](https://huggingface.co/{name})'
    program = _program(name, is_repository=repository is not None)
    text = (
        f'---\n{yaml.safe_dump(front, sort_keys=True)}---\n\n# {title}\n\n'
        f'A LoRA adapter of {link}, trained with Twinkle.\n\n| | |\n| --- | --- |\n{table}\n'
        f'## Load the adapter\n\n```python\n{program}```\n\n'
    )
    return signed_card(text)


def _program(base_model: str, *, is_repository: bool) -> str:
    """Return a program that loads the adapter and its tokenizer from the current folder."""
    source = repr(base_model)
    if is_repository:
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
    """Return a value as code in a cell of a table; the value cannot end the cell."""
    return f'`{" ".join(value.split()).replace("`", "").replace("|", "/")}`'
