"""A tiny vision-language model with random weights, for machines that are too small for a real model.

The model has the architecture of Qwen2.5-VL: a vision tower, and a text model with positions in time, height and width.
A training run with this model shows that the path from pixels to gradients works.
"""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

SPECIAL_TOKENS = (
    '<|endoftext|>',
    '<|im_start|>',
    '<|im_end|>',
    '<|vision_start|>',
    '<|vision_end|>',
    '<|image_pad|>',
    '<|video_pad|>',
)
"""Special tokens, with the ids 0 to 6."""
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
PATCH_SIZE = 8
"""Side of a patch in pixels; four patches become one token."""


def build_tiny_vision_model(folder: Path, *, seed: int = 0, hidden_size: int = 64) -> Path:
    """Write the model, its tokenizer and its image processor to `folder`, and return the folder.

    Args:
        folder: Output folder; created if necessary.
        seed: Seed of the weights.
        hidden_size: Hidden size of the text model, a multiple of 64.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen2_5_VLForConditionalGeneration(_config(hidden_size)).save_pretrained(folder)
    _write_tokenizer(folder)
    processor = {
        'image_processor_type': 'Qwen2VLImageProcessor',
        'patch_size': PATCH_SIZE,
        'temporal_patch_size': 2,
        'merge_size': 2,
        'size': {'shortest_edge': (2 * PATCH_SIZE) ** 2, 'longest_edge': 128 * 128},
    }
    (folder / 'preprocessor_config.json').write_text(json.dumps(processor, indent=2))
    return folder


def _config(hidden_size: int) -> Qwen2_5_VLConfig:
    text = {
        'hidden_size': hidden_size,
        'intermediate_size': 2 * hidden_size,
        'num_hidden_layers': 2,
        'num_attention_heads': hidden_size // 32,
        'num_key_value_heads': hidden_size // 64,
        'vocab_size': 320,
        'max_position_embeddings': 512,
        'initializer_range': hidden_size**-0.5,
        'rope_parameters': {'rope_type': 'default', 'rope_theta': 10000.0, 'mrope_section': [4, 6, 6]},
        'bos_token_id': 1,
        'eos_token_id': 2,
        'pad_token_id': 0,
    }
    vision = {
        'depth': 2,
        'hidden_size': 64,
        'intermediate_size': 128,
        'num_heads': 2,
        'patch_size': PATCH_SIZE,
        'out_hidden_size': hidden_size,
        'window_size': 4 * PATCH_SIZE,
        'fullatt_block_indexes': [1],
        'initializer_range': 0.125,
    }
    names = {'vision_start_token_id': 3, 'vision_end_token_id': 4, 'image_token_id': 5, 'video_token_id': 6}
    return Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, dtype='float32', **names)


def _write_tokenizer(folder: Path) -> None:
    vocabulary = {token: index for index, token in enumerate(SPECIAL_TOKENS)}
    for character in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[character] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(folder / 'tokenizer.json'))
    settings = {
        'tokenizer_class': 'PreTrainedTokenizerFast',
        'eos_token': '<|im_end|>',
        'pad_token': '<|endoftext|>',
        'clean_up_tokenization_spaces': False,
        'chat_template': CHAT_TEMPLATE,
    }
    (folder / 'tokenizer_config.json').write_text(json.dumps(settings, indent=2))
