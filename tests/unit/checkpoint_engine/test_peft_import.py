"""Unit tests of the import of PEFT adapters: supported settings give PEFT's results, and other settings are refused."""

import json
import re
import shutil
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from fixtures.peft_oracle import label_logprobs
from fixtures.tiny_model import build_tiny_model
from twinkle.checkpoint_engine import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_MODEL_FILE,
    InvalidPeftFolder,
    adapter_config_json,
    parse_adapter_config,
    read_peft_folder,
    write_peft_folder,
)
from twinkle.checkpoint_engine.peft_import import import_adapter
from twinkle.data_format import LoraConfig
from twinkle.nn import AdapterSpan, PackedCausalLM, SequenceSpan, load_adapter

IDS = [5, 100, 17, 250, 42, 9, 77, 203]
SHAPES = {f'base_model.model.m.q.lora_{part}.weight': (4, 4) for part in 'AB'}
CONFIG = {'peft_type': 'LORA', 'r': 4, 'lora_alpha': 8, 'target_modules': ['q']}

CONFIGS = {
    'names': {'target_modules': ['q_proj', 'down_proj']},
    'all linear': {'target_modules': 'all-linear'},
    'expression': {'target_modules': r'.*\.1\.(self_attn\.[qk]_proj|mlp\.up_proj)'},
    'excluded layers': {'target_modules': ['q_proj', 'v_proj'], 'exclude_modules': r'.*layers\.0\.self_attn\.v_proj'},
    'one layer': {'target_modules': ['q_proj'], 'layers_to_transform': [1]},
    'rank-stabilised': {'target_modules': ['q_proj', 'o_proj'], 'use_rslora': True},
    'patterns': {
        'target_modules': ['q_proj', 'v_proj', 'up_proj'],
        'rank_pattern': {r'layers\.0\..*q_proj': 2, 'q_proj': 6, 'up_proj': 3},
        'alpha_pattern': {'v_proj': 5, r'layers.\d.mlp.up_proj': 11},
    },
    'first match': {
        'target_modules': ['q_proj'],
        'rank_pattern': {'layers.1.self_attn.q_proj': 5, 'q_proj': 2},
        'alpha_pattern': {'layers.0.self_attn.q_proj': 3, 'q_proj': 7},
    },
    'anchored pattern': {'target_modules': ['q_proj'], 'alpha_pattern': {'^model.layers.1.self_attn.q_proj': 20}},
    'other initialization': {'target_modules': ['q_proj'], 'init_lora_weights': 'orthogonal'},
}
"""Options of `peft.LoraConfig`, by the feature that they use."""


@pytest.fixture(scope='module')
def base(tmp_path_factory):
    """Return the folder of a tiny model."""
    return build_tiny_model(tmp_path_factory.mktemp('base'))


@pytest.fixture(scope='module')
def packed(base):
    """Return the model as this library's `PackedModel`."""
    return PackedCausalLM.load(base)


def saved_by_peft(base: Path, folder: Path, **options):
    """Make PEFT save an adapter with random weights; return the log-probabilities that PEFT computes."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base, attn_implementation='eager')
    model = peft.get_peft_model(model, peft.LoraConfig(**{'r': 4, 'lora_alpha': 9, **options}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if 'lora_' in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape))
        model.save_pretrained(folder)
        return label_logprobs(model, IDS[:-1], IDS[1:])


def our_logprobs(packed, folder: Path):
    """Return the log-probabilities that this library computes with a folder's adapter."""
    weights = load_adapter(folder, packed.layers)
    count = len(IDS) - 1
    with torch.no_grad():
        hidden = packed.hidden(
            torch.tensor(IDS[:-1]),
            torch.arange(count),
            sequences=[SequenceSpan(0, count)],
            adapters=[AdapterSpan(0, count, weights)],
        )
        return packed.label_logprobs(hidden, torch.tensor(IDS[1:]))


@pytest.mark.filterwarnings('ignore::UserWarning:peft')
@pytest.mark.filterwarnings('ignore:It is not recommended')
@pytest.mark.parametrize('name', CONFIGS)
def test_an_imported_adapter_gives_pefts_results(base, packed, tmp_path, name):
    """PEFT and this library compute the same log-probabilities, even after this library has written the folder."""
    expected = saved_by_peft(base, tmp_path / 'theirs', **CONFIGS[name])
    torch.testing.assert_close(our_logprobs(packed, tmp_path / 'theirs'), expected, rtol=1e-5, atol=1e-5)
    tensors, config = read_peft_folder(tmp_path / 'theirs')
    write_peft_folder(tmp_path / 'ours', tensors, config, base_model=str(base))
    torch.testing.assert_close(our_logprobs(packed, tmp_path / 'ours'), expected, rtol=1e-5, atol=1e-5)
    model = AutoModelForCausalLM.from_pretrained(base, attn_implementation='eager')
    loaded = peft.PeftModel.from_pretrained(model, tmp_path / 'ours')
    with torch.no_grad():
        torch.testing.assert_close(label_logprobs(loaded, IDS[:-1], IDS[1:]), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('name', ['names', 'rank-stabilised', 'first match'])
def test_supported_names_are_kept(base, tmp_path, name):
    """Module names that `LoraConfig` supports are kept and are not expanded to layers."""
    saved_by_peft(base, tmp_path / 'a', **CONFIGS[name])
    _, config = read_peft_folder(tmp_path / 'a')
    assert config.target_modules == tuple(sorted(CONFIGS[name]['target_modules']))
    assert dict(config.rank_pattern) == CONFIGS[name].get('rank_pattern', {})
    assert list(config.alpha_pattern) == list(CONFIGS[name].get('alpha_pattern', {}))


@pytest.mark.parametrize(
    'rename',
    [
        lambda name: re.sub(r'(lora_[AB])\.', r'\1.default.', name),
        lambda name: re.sub(r'(lora_[AB])\.', r'\1.policy_2.', name),
        lambda name: name.removeprefix('base_model.model.'),
    ],
)
def test_tensor_names_of_other_tools_are_supported(base, packed, tmp_path, rename):
    """Tensor names that contain the adapter's name, or lack PEFT's prefix, are converted to canonical names."""
    expected = saved_by_peft(base, tmp_path / 'a', target_modules=['q_proj'])
    path = tmp_path / 'a' / ADAPTER_MODEL_FILE
    save_file({rename(name): tensor for name, tensor in load_file(path).items()}, path)
    torch.testing.assert_close(our_logprobs(packed, tmp_path / 'a'), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('initialization', ['pissa', 'olora'])
def test_an_adapter_of_a_modified_base_is_refused(base, tmp_path, initialization):
    """An adapter whose initialization modifies the base model is refused."""
    saved_by_peft(base, tmp_path / 'a', target_modules=['q_proj'], init_lora_weights=initialization)
    with pytest.raises(InvalidPeftFolder, match='init_lora_weights'):
        read_peft_folder(tmp_path / 'a')


@pytest.mark.parametrize(
    ('options', 'offending_name'),
    [
        ({'use_dora': True}, 'use_dora'),
        ({'bias': 'lora_only'}, 'bias'),
        ({'modules_to_save': ['lm_head']}, 'modules_to_save'),
        ({'trainable_token_indices': [1, 2]}, 'trainable_token_indices'),
    ],
)
@pytest.mark.filterwarnings('ignore:Model has `tie_word_embeddings')
def test_unsupported_features_are_refused_by_name(base, tmp_path, options, offending_name):
    """A folder that PEFT saved with an unsupported feature is refused, and the error names the field."""
    saved_by_peft(base, tmp_path / 'a', target_modules=['v_proj'], **options)
    with pytest.raises(InvalidPeftFolder) as refusal:
        read_peft_folder(tmp_path / 'a')
    assert offending_name in str(refusal.value)


def test_a_pickle_file_is_never_opened(base, tmp_path):
    """A folder with only pickled weights is refused; a pickle next to safetensors is ignored."""
    saved_by_peft(base, tmp_path / 'a', target_modules=['q_proj'])
    shutil.copy(tmp_path / 'a' / ADAPTER_MODEL_FILE, tmp_path / 'kept')
    (tmp_path / 'a' / ADAPTER_MODEL_FILE).rename(tmp_path / 'a' / 'adapter_model.bin')
    with pytest.raises(InvalidPeftFolder) as refusal:
        read_peft_folder(tmp_path / 'a')
    assert refusal.value.file_name == 'adapter_model.bin'
    assert 'safe_serialization' in refusal.value.problem
    shutil.copy(tmp_path / 'kept', tmp_path / 'a' / ADAPTER_MODEL_FILE)
    read_peft_folder(tmp_path / 'a')


@pytest.mark.parametrize(
    ('shapes', 'change'),
    [
        ({}, {}),
        ({**SHAPES, 'base_model.model.m.k.lora_A.weight': (4, 4)}, {'target_modules': ['q', 'k']}),
        ({**SHAPES, 'base_model.model.m.embed.lora_embedding_A': (4, 4)}, {}),
        ({**SHAPES, 'base_model.model.m.q.lora_magnitude_vector.weight': (4,)}, {}),
        ({**SHAPES, 'base_model.model.m.q.base_layer.weight': (4, 4)}, {}),
        ({name.replace('.weight', '.a.weight'): (4, 4) for name in SHAPES} | SHAPES, {}),
        (dict.fromkeys(SHAPES, (4, 4, 1)), {}),
        (dict.fromkeys(SHAPES, (4, 3)), {}),
        (SHAPES, {'r': 2}),
        (SHAPES, {'rank_pattern': {'q': 3}}),
        (SHAPES, {'target_modules': ['k']}),
        (SHAPES, {'target_modules': ['q', 'k']}),
        (SHAPES, {'alpha_pattern': {'(a+)+q': 1.0}}),
        (SHAPES, {'alpha_pattern': {'.*.*.*q': 1.0}}),
        (SHAPES, {'alpha_pattern': {'(?i)q': 1.0}}),
        (SHAPES, {'alpha_pattern': {r'(.)\1q': 1.0}}),
        (SHAPES, {'alpha_pattern': {'(q': 1.0}}),
        (SHAPES, {'alpha_pattern': {'.' * 300: 1.0}}),
        (SHAPES, {'alpha_pattern': {'q{9999999999999999999}': 1.0}}),
        (SHAPES, {'alpha_pattern': {'.*.+q': 1.0}}),
        (SHAPES, {'alpha_pattern': {'(x|xx)' * 40: 1.0}}),
        (SHAPES, {'alpha_pattern': {'((x|xx)(x|xx)|(x|xx))' * 8: 1.0}}),
        (SHAPES, {'alpha_pattern': {f'.q{number}': 1.0 for number in range(300)}}),
    ],
)
def test_inconsistent_folders_are_refused(shapes, change):
    """Missing factors, unknown tensors, contradictory ranks, and slow or invalid expressions raise ValueError."""
    with pytest.raises(ValueError, match=r'\w'):
        import_adapter(json.dumps({**CONFIG, **change}).encode(), shapes)


def layers(*paths):
    """Return the tensor shapes of an adapter of these layers."""
    return {f'{path}.lora_{part}.weight': (4, 4) for path in paths for part in 'AB'}


@pytest.mark.parametrize(
    ('shapes', 'change', 'offending_name'),
    [
        (layers('x' * 600 + '.q'), {'alpha_pattern': {'.*x.*y': 1.0}}, 'characters'),
        (layers('x.' * 60 + 'q'), {'alpha_pattern': {'.*x.*y': 1.0}}, 'parts'),
        (
            layers(*(f'{number}.q' for number in range(5000))),
            {'rank_pattern': {f'x{number}': 4 for number in range(5001)}},
            'rank_pattern',
        ),
    ],
)
def test_adapters_that_take_long_to_compare_are_refused(shapes, change, offending_name):
    """Long layer names, layer names with many parts and patterns with many names are refused."""
    with pytest.raises(ValueError, match=offending_name):
        import_adapter(json.dumps({**CONFIG, **change}).encode(), shapes)


def test_matching_time_is_limited():
    """Matching of expressions stops at the time limit with a ValueError."""
    with pytest.raises(ValueError, match='alpha_pattern'):
        import_adapter(json.dumps({**CONFIG, 'alpha_pattern': {'.*q': 1.0}}).encode(), SHAPES, matching_seconds=-1)


@pytest.mark.parametrize('text', ['.*(a|b|c|d|e|f|q)', r'm\.(q|k)', r'[(|]?.*q', r'layers\.\d+.*|m.q'])
def test_common_expressions_are_supported(text):
    """Expressions with alternatives and one or two wildcards are supported."""
    adapter = import_adapter(json.dumps({**CONFIG, 'alpha_pattern': {text: 3.0}}).encode(), SHAPES)
    assert dict(adapter.config.alpha_pattern) == {'m.q': 3.0}


def test_names_that_match_no_layer_are_dropped():
    """Names in a pattern that match no layer are removed, as in PEFT."""
    change = {'rank_pattern': {'other': 2, 'q': 4}, 'alpha_pattern': {'other': 2, 'm.q': 4}}
    config = import_adapter(json.dumps({**CONFIG, **change}).encode(), SHAPES).config
    assert (dict(config.rank_pattern), dict(config.alpha_pattern)) == ({'q': 4}, {'m.q': 4})


@pytest.mark.parametrize(
    ('field', 'value'),
    [
        *(('lora_alpha', value) for value in (float('inf'), float('nan'), 10**400, 0, -1, True)),
        *(('alpha_pattern', {'q': value}) for value in (float('inf'), float('nan'), 10**400, 0)),
        *(('rank_pattern', {'q': value}) for value in (float('inf'), 4.0, 1 << 31, 0, True)),
        *(('r', value) for value in (float('nan'), 1 << 31, 0)),
        ('lora_dropout', float('nan')),
    ],
)
def test_numbers_out_of_range_are_refused(field, value):
    """A number out of range or of a wrong type raises a ValueError with the field's name and the shortened value."""
    with pytest.raises(ValueError, match=f'^{field} = .{{1,150}}$'):
        import_adapter(json.dumps({**CONFIG, field: value}).encode(), SHAPES)


@pytest.mark.parametrize('seed', [1 << 63, -(1 << 63) - 1])
def test_a_seed_out_of_range_is_refused(seed):
    """A seed that does not fit into 64 bits raises ValueError."""
    with pytest.raises(ValueError, match='seed'):
        import_adapter(json.dumps(CONFIG).encode(), SHAPES, seed=seed)


def test_patterns_keep_their_order():
    """Patterns keep their order, because the first matching name determines the rank."""
    ranks = {'q': 2, 'layers.1.q': 5}
    config = LoraConfig(r=4, target_modules=('q',), rank_pattern=ranks, alpha_pattern={'q': 2.0, 'layers.1.q': 5.0})
    file = adapter_config_json(config, base_model='m', tensor_names=())
    loaded, _ = parse_adapter_config(file)
    assert list(loaded.rank_pattern.items()) == list(ranks.items())
    assert list(loaded.alpha_pattern) == list(ranks)


@pytest.mark.parametrize('field', ['lora_bias', 'use_qalora', 'use_bdlora', 'target_parameters', 'arrow_config'])
def test_fields_of_newer_releases_are_refused(field):
    """Fields of newer PEFT releases that change the computation raise ValueError."""
    with pytest.raises(ValueError, match=field):
        import_adapter(json.dumps({**CONFIG, field: ['x']}).encode(), SHAPES)


def test_a_single_target_is_written_as_a_list(tmp_path, base, packed):
    """A single target module is written as a list, because PEFT interprets a string as an expression."""
    saved_by_peft(base, tmp_path / 'a', target_modules=['q_proj'])
    tensors, config = read_peft_folder(tmp_path / 'a')
    single_target = LoraConfig(r=config.r, lora_alpha=config.lora_alpha, target_modules='q_proj')
    write_peft_folder(tmp_path / 'b', tensors, single_target, base_model='m')
    assert json.loads((tmp_path / 'b' / ADAPTER_CONFIG_FILE).read_text())['target_modules'] == ['q_proj']


@pytest.mark.parametrize(
    'options',
    [
        {'use_dora': True},
        {'bias': 'all'},
        {'modules_to_save': ['lm_head']},
        {'init_lora_weights': 'pissa'},
        {'init_lora_weights': False},
        {'exclude_modules': ['k_proj']},
        {'layers_to_transform': [0]},
    ],
)
def test_unsupported_fields_of_a_peft_configuration_are_refused(options):
    """A PEFT configuration object with an unsupported option raises a ValueError that names the option."""
    with pytest.raises(ValueError, match=next(iter(options))):
        LoraConfig.of(peft.LoraConfig(target_modules=['q_proj'], **options))
    assert LoraConfig.of(peft.LoraConfig(r=3, target_modules={'q_proj'})).r == 3
