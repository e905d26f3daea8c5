"""A tiny model with random weights, with which the examples run on any machine in seconds."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIAL_TOKENS = ('<|endoftext|>', '<|im_start|>', '<|im_end|>')
CHATS = [
    [{'role': 'user', 'content': question}, {'role': 'assistant', 'content': answer}]
    for question, answer in (('Hello?', 'Hello.'), ('Who?', 'Twinkle.'), ('Why?', 'To learn.'), ('Bye?', 'Bye.'))
]
"""Training data."""


@contextmanager
def tiny_tokenizer() -> Iterator[str]:
    """Create a byte-level tokenizer with a chat template in a temporary folder, and yield the folder."""
    with tempfile.TemporaryDirectory(prefix='tiny-') as folder:
        vocabulary = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
        tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(vocabulary)}, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
        tokenizer.save(f'{folder}/tokenizer.json')
        names = dict(zip(('unk_token', 'bos_token', 'eos_token'), SPECIAL_TOKENS, strict=True))
        settings = {'tokenizer_class': 'PreTrainedTokenizerFast', 'chat_template': CHAT_TEMPLATE, **names}
        (Path(folder) / 'tokenizer_config.json').write_text(json.dumps(settings))
        yield folder


@contextmanager
def tiny_model(seed: int = 0) -> Iterator[str]:
    """Create a Llama model with two layers of width 64 in a temporary folder, and yield the folder."""
    import torch  # noqa: PLC0415 - not needed for the tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415 - not needed for the tokenizer

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    with tiny_tokenizer() as folder:
        LlamaForCausalLM(config).save_pretrained(folder)
        yield folder
