"""Unit tests of GGUF files: transformers reads them back with the same logits, and unsupported models are refused."""

import inspect
import json
import math

import pytest
import torch
from gguf import GGUFReader
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from fixtures.tiny_model import HEAD_DIM, VOCAB_SIZE, add_merge, build_tiny_model
from twinkle.checkpoint_engine import InvalidModelFolder
from twinkle.checkpoint_engine.gguf_file import GGUF_DTYPES, GgufModel

IDS = torch.tensor([[5, 100, 17, 250, 42, 9, 77, 203]])
LLAMA_3 = {
    'rope_type': 'llama3',
    'rope_theta': 10000.0,
    'factor': 8.0,
    'low_freq_factor': 1.0,
    'high_freq_factor': 4.0,
    'original_max_position_embeddings': 64,
}
LLAMA_REGEX = inspect.signature(TikTokenConverter).parameters['pattern'].default
"""Expression of Llama 3's tokenizer."""
BYTES = {'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': True}


def split(expression):
    """Return the step that splits text by an expression."""
    return {'type': 'Split', 'pattern': {'Regex': expression}, 'behavior': 'Isolated', 'invert': False}


def model(folder, family='llama', *, config=(), tokenizer=()):
    """Write a tiny model whose tokenizer has a merge; `config` and `tokenizer` are changes of the two files."""
    build_tiny_model(folder, family=family)
    add_merge(folder)
    content = json.loads((folder / 'tokenizer.json').read_text())
    (folder / 'tokenizer.json').write_text(json.dumps({**content, **dict(tokenizer)}))
    options = json.loads((folder / 'config.json').read_text())
    (folder / 'config.json').write_text(json.dumps({**options, **dict(config)}))
    return folder


def write(folder, target, **options):
    """Convert a folder; return the reported numbers of bytes."""
    reports = []
    GgufModel(folder, **options).write(target, lambda *report: reports.append(report))
    return reports


def logits(folder, **options):
    """Return the logits of a few tokens."""
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    with torch.no_grad():
        return loaded(input_ids=IDS).logits


@pytest.mark.parametrize('family', ['llama', 'qwen2', 'qwen3'])
def test_transformers_reads_the_same_model(tmp_path, family):
    """The logits are those of the folder in float32, and differ by rounding in other types."""
    folder = model(tmp_path / 'model', family)
    # Transformers does not read the size of the heads of Qwen3.
    config = {'config': AutoConfig.from_pretrained(folder)} if family == 'qwen3' else {}
    expected = logits(folder)
    for dtype, difference in (('float32', 1e-5), ('float16', 0.05), ('bfloat16', 0.2), ('q8_0', 0.5)):
        reports = write(folder, tmp_path / 'model.gguf', dtype=dtype)
        assert reports[-1][0] == reports[-1][1]
        found = logits(tmp_path, gguf_file='model.gguf', **config)
        assert (found - expected).abs().max() <= difference
    assert sorted(path.name for path in tmp_path.iterdir()) == ['model', 'model.gguf']


def test_file_has_the_tokenizer(tmp_path):
    """The file has all tokens, the way of splitting text, the special tokens and the chat template."""
    folder = model(tmp_path / 'model', 'qwen2')
    write(folder, tmp_path / 'model.gguf', name='mine')
    fields = {name: field.contents() for name, field in GGUFReader(tmp_path / 'model.gguf').fields.items()}
    assert fields['general.name'] == 'mine'
    assert len(fields['tokenizer.ggml.tokens']) == VOCAB_SIZE
    assert fields['tokenizer.ggml.tokens'][300] == 'he'
    assert fields['tokenizer.ggml.tokens'][1] == '<|im_start|>'
    assert fields['tokenizer.ggml.token_type'][:4] == [3, 3, 3, 1]
    assert fields['tokenizer.ggml.token_type'][-1] == 5
    assert fields['tokenizer.ggml.merges'] == ['h e']
    assert (fields['tokenizer.ggml.model'], fields['tokenizer.ggml.pre']) == ('gpt2', 'gpt-2')
    assert (fields['tokenizer.ggml.bos_token_id'], fields['tokenizer.ggml.eos_token_id']) == (1, 2)
    assert '<|im_start|>' in fields['tokenizer.chat_template']


@pytest.mark.parametrize(
    ('steps', 'name'),
    [
        ([{'type': 'Digits', 'individual_digits': True}, {**BYTES, 'use_regex': True}], 'smollm'),
        ([split(PRETOKENIZE_REGEX), {**BYTES, 'use_regex': False}], 'qwen2'),
        ([split(LLAMA_REGEX), {**BYTES, 'use_regex': False}], 'llama-bpe'),
    ],
)
def test_way_of_splitting_is_recognized(tmp_path, steps, name):
    """The names of llama.cpp are chosen by the steps of the tokenizer."""
    tokenizer = {'pre_tokenizer': {'type': 'Sequence', 'pretokenizers': steps}}
    write(model(tmp_path / 'model', tokenizer=tokenizer), tmp_path / 'model.gguf')
    fields = GGUFReader(tmp_path / 'model.gguf').fields
    assert fields['tokenizer.ggml.pre'].contents() == name


def test_scaled_frequencies_of_llama_3_are_stored(tmp_path):
    """The stored factors divide the frequencies as transformers scales them."""
    folder = model(tmp_path / 'model', config={'rope_parameters': LLAMA_3})
    write(folder, tmp_path / 'model.gguf')
    (stored,) = (item.data for item in GGUFReader(tmp_path / 'model.gguf').tensors if item.name == 'rope_freqs.weight')
    scaled, _ = ROPE_INIT_FUNCTIONS['llama3'](AutoConfig.from_pretrained(folder), torch.device('cpu'))
    plain = 1 / LLAMA_3['rope_theta'] ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    assert torch.allclose(plain / torch.from_numpy(stored.copy()), scaled, rtol=1e-5)
    assert math.isclose(stored.max(), LLAMA_3['factor'], rel_tol=1e-5)


@pytest.mark.parametrize(
    ('config', 'named'),
    [
        ({'architectures': ['GemmaForCausalLM']}, 'GemmaForCausalLM'),
        ({'rope_parameters': {**LLAMA_3, 'rope_type': 'yarn'}}, 'yarn'),
        ({'use_sliding_window': True}, 'sliding window'),
        ({'attention_bias': True}, 'biases'),
        ({'hidden_act': 'gelu'}, 'gelu'),
        ({'num_hidden_layers': 1}, 'model.layers.1'),
        ({'rms_norm_eps': None}, 'lacks rms_norm_eps'),
        ({'rope_parameters': {'rope_type': 'llama3', 'factor': 8.0}}, 'lacks high_freq_factor'),
    ],
)
def test_unsupported_model_is_refused_by_name(tmp_path, config, named):
    """Architectures and options without support in the conversion are refused, and the message names them."""
    with pytest.raises(InvalidModelFolder, match=named):
        GgufModel(model(tmp_path / 'model', config=config))


@pytest.mark.parametrize(
    'tokenizer',
    [
        {'pre_tokenizer': None},
        {'pre_tokenizer': {'type': 'Metaspace'}},
        {'pre_tokenizer': {**BYTES, 'add_prefix_space': True}},
        {'normalizer': {'type': 'Lowercase'}},
        {'model': {'type': 'Unigram', 'vocab': []}},
        {'model': 3},
    ],
)
def test_unsupported_tokenizer_is_refused(tmp_path, tokenizer):
    """Tokenizers that llama.cpp would run in another way are refused."""
    with pytest.raises(InvalidModelFolder, match=r'tokenizer\.json'):
        GgufModel(model(tmp_path / 'model', tokenizer=tokenizer))


def test_failed_conversion_leaves_no_file(tmp_path):
    """A conversion that ends early leaves an existing file unchanged; unknown types are refused before."""
    folder = model(tmp_path / 'model')
    (tmp_path / 'model.gguf').write_bytes(b'earlier')

    def stop(done, total):
        raise RuntimeError(f'{done} of {total}')

    with pytest.raises(RuntimeError):
        GgufModel(folder).write(tmp_path / 'model.gguf', stop)
    with pytest.raises(ValueError, match=', '.join(GGUF_DTYPES)):
        GgufModel(folder, dtype='q4_k')
    assert sorted(path.name for path in tmp_path.iterdir()) == ['model', 'model.gguf']
    assert (tmp_path / 'model.gguf').read_bytes() == b'earlier'
