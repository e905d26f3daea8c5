"""Adapters that peft itself saved, in every way it can say which layers, ranks and alphas: same log-probabilities."""

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
    'left out': {'target_modules': ['q_proj', 'v_proj'], 'exclude_modules': r'.*layers\.0\.self_attn\.v_proj'},
    'one layer': {'target_modules': ['q_proj'], 'layers_to_transform': [1]},
    'rank-stabilised': {'target_modules': ['q_proj', 'o_proj'], 'use_rslora': True},
    'patterns': {
        'target_modules': ['q_proj', 'v_proj', 'up_proj'],
        'rank_pattern': {r'layers\.0\..*q_proj': 2, 'q_proj': 6, 'up_proj': 3},
        'alpha_pattern': {'v_proj': 5, r'layers.\d.mlp.up_proj': 11},
    },
    'first that fits': {
        'target_modules': ['q_proj'],
        'rank_pattern': {'layers.1.self_attn.q_proj': 5, 'q_proj': 2},
        'alpha_pattern': {'layers.0.self_attn.q_proj': 3, 'q_proj': 7},
    },
    'from the beginning': {'target_modules': ['q_proj'], 'alpha_pattern': {'^model.layers.1.self_attn.q_proj': 20}},
    'other start': {'target_modules': ['q_proj'], 'init_lora_weights': 'orthogonal'},
}


@pytest.fixture(scope='module')
def base(tmp_path_factory):
    """Return the folder of a tiny model."""
    return build_tiny_model(tmp_path_factory.mktemp('base'))


@pytest.fixture(scope='module')
def packed(base):
    """Return it as our forward path."""
    return PackedCausalLM.load(base)


def saved_by_peft(base: Path, folder: Path, **options):
    """Save an adapter with random weights by peft; return its log-probabilities."""
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
    """Return the log-probabilities of the adapter of a folder on our forward path."""
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
def test_an_adapter_of_pefts_means_the_same_here(base, packed, tmp_path, name):
    """And after it went through our folder, the same to us and to peft again."""
    expected = saved_by_peft(base, tmp_path / 'theirs', **CONFIGS[name])
    torch.testing.assert_close(our_logprobs(packed, tmp_path / 'theirs'), expected, rtol=1e-5, atol=1e-5)
    tensors, config = read_peft_folder(tmp_path / 'theirs')
    write_peft_folder(tmp_path / 'ours', tensors, config, base_model=str(base))
    torch.testing.assert_close(our_logprobs(packed, tmp_path / 'ours'), expected, rtol=1e-5, atol=1e-5)
    model = AutoModelForCausalLM.from_pretrained(base, attn_implementation='eager')
    again = peft.PeftModel.from_pretrained(model, tmp_path / 'ours')
    with torch.no_grad():
        torch.testing.assert_close(label_logprobs(again, IDS[:-1], IDS[1:]), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('words', ['names', 'rank-stabilised', 'first that fits'])
def test_words_that_we_share_are_kept(base, tmp_path, words):
    """A folder's names come back as names, not as a list of layers."""
    saved_by_peft(base, tmp_path / 'a', **CONFIGS[words])
    _, config = read_peft_folder(tmp_path / 'a')
    assert config.target_modules == tuple(sorted(CONFIGS[words]['target_modules']))
    assert dict(config.rank_pattern) == CONFIGS[words].get('rank_pattern', {})
    assert list(config.alpha_pattern) == list(CONFIGS[words].get('alpha_pattern', {}))


@pytest.mark.parametrize(
    'rename',
    [
        lambda name: re.sub(r'(lora_[AB])\.', r'\1.default.', name),
        lambda name: re.sub(r'(lora_[AB])\.', r'\1.policy_2.', name),
        lambda name: name.removeprefix('base_model.model.'),
    ],
)
def test_names_of_other_tools_are_understood(base, packed, tmp_path, rename):
    """A state dict's names hold the adapter's; some tools leave out peft's prefix."""
    expected = saved_by_peft(base, tmp_path / 'a', target_modules=['q_proj'])
    path = tmp_path / 'a' / ADAPTER_MODEL_FILE
    save_file({rename(name): tensor for name, tensor in load_file(path).items()}, path)
    torch.testing.assert_close(our_logprobs(packed, tmp_path / 'a'), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('start', ['pissa', 'olora'])
def test_an_adapter_of_a_changed_base_is_refused(base, tmp_path, start):
    """Applied to the plain base model it would be another model, with nothing to show for it."""
    saved_by_peft(base, tmp_path / 'a', target_modules=['q_proj'], init_lora_weights=start)
    with pytest.raises(InvalidPeftFolder, match='init_lora_weights'):
        read_peft_folder(tmp_path / 'a')


@pytest.mark.parametrize(
    ('options', 'culprit'),
    [
        ({'use_dora': True}, 'use_dora'),
        ({'bias': 'lora_only'}, 'bias'),
        ({'modules_to_save': ['lm_head']}, 'modules_to_save'),
        ({'trainable_token_indices': [1, 2]}, 'trainable_token_indices'),
    ],
)
@pytest.mark.filterwarnings('ignore:Model has `tie_word_embeddings')
def test_what_cannot_be_honoured_is_refused_by_name(base, tmp_path, options, culprit):
    """As peft itself writes it."""
    saved_by_peft(base, tmp_path / 'a', target_modules=['v_proj'], **options)
    with pytest.raises(InvalidPeftFolder) as refusal:
        read_peft_folder(tmp_path / 'a')
    assert culprit in str(refusal.value)


def test_a_pickle_is_never_opened(base, tmp_path):
    """Its name is in the refusal, with what to do; beside safetensors it is only ignored."""
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
def test_folders_that_contradict_themselves_are_refused(shapes, change):
    """Missing halves, foreign tensors, ranks that differ from the shapes, and expressions that could take for ever."""
    with pytest.raises(ValueError, match=r'\w'):
        import_adapter(json.dumps({**CONFIG, **change}).encode(), shapes)


def layers(*paths):
    """Return the shapes of an adapter of these layers."""
    return {f'{path}.lora_{part}.weight': (4, 4) for path in paths for part in 'AB'}


@pytest.mark.parametrize(
    ('shapes', 'change', 'culprit'),
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
def test_what_would_take_long_to_compare_is_refused(shapes, change, culprit):
    """By its size, before anything of it is compared."""
    with pytest.raises(ValueError, match=culprit):
        import_adapter(json.dumps({**CONFIG, **change}).encode(), shapes)


def test_expressions_have_an_end():
    """However many layers there are: the refusal says what to do."""
    with pytest.raises(ValueError, match='alpha_pattern take too long to match; name the layers'):
        import_adapter(json.dumps({**CONFIG, 'alpha_pattern': {'.*q': 1.0}}).encode(), SHAPES, matching_seconds=-1)


@pytest.mark.parametrize('text', ['.*(a|b|c|d|e|f|q)', r'm\.(q|k)', r'[(|]?.*q', r'layers\.\d+.*|m.q'])
def test_expressions_that_people_write_are_taken(text):
    """Alternatives and a wildcard or two."""
    adapter = import_adapter(json.dumps({**CONFIG, 'alpha_pattern': {text: 3.0}}).encode(), SHAPES)
    assert dict(adapter.config.alpha_pattern) == {'m.q': 3.0}


def test_names_of_no_layer_are_left_out():
    """As by peft; an adapter that is made from them would be refused."""
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
def test_numbers_that_no_adapter_can_have_are_refused(field, value):
    """By the field's name, and shortly."""
    with pytest.raises(ValueError, match=f'^{field} = .{{1,150}}$'):
        import_adapter(json.dumps({**CONFIG, field: value}).encode(), SHAPES)


@pytest.mark.parametrize('seed', [1 << 63, -(1 << 63) - 1])
def test_a_seed_that_is_kept_nowhere_is_refused(seed):
    """It is kept in 64 bits."""
    with pytest.raises(ValueError, match='seed'):
        import_adapter(json.dumps(CONFIG).encode(), SHAPES, seed=seed)


def test_patterns_keep_their_order():
    """Of a path's names the first counts, so sorting them, as peft does when it saves, would mean other ranks."""
    ranks = {'q': 2, 'layers.1.q': 5}
    config = LoraConfig(r=4, target_modules=('q',), rank_pattern=ranks, alpha_pattern={'q': 2.0, 'layers.1.q': 5.0})
    file = adapter_config_json(config, base_model='m', tensor_names=())
    again, _ = parse_adapter_config(file)
    assert list(again.rank_pattern.items()) == list(ranks.items())
    assert list(again.alpha_pattern) == list(ranks)


@pytest.mark.parametrize('field', ['lora_bias', 'use_qalora', 'use_bdlora', 'target_parameters', 'arrow_config'])
def test_fields_of_newer_releases_are_refused_too(field):
    """Each changes what the layers compute."""
    with pytest.raises(ValueError, match=field):
        import_adapter(json.dumps({**CONFIG, field: ['x']}).encode(), SHAPES)


def test_a_lone_target_is_written_as_a_list(tmp_path, base, packed):
    """To peft a string is an expression that has to match the whole path, to us it is a name."""
    saved_by_peft(base, tmp_path / 'a', target_modules=['q_proj'])
    tensors, config = read_peft_folder(tmp_path / 'a')
    lone = LoraConfig(r=config.r, lora_alpha=config.lora_alpha, target_modules='q_proj')
    write_peft_folder(tmp_path / 'b', tensors, lone, base_model='m')
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
def test_a_peft_configuration_that_asks_for_more_is_refused(options):
    """An adapter made from it would quietly be another one."""
    with pytest.raises(ValueError, match=next(iter(options))):
        LoraConfig.of(peft.LoraConfig(target_modules=['q_proj'], **options))
    assert LoraConfig.of(peft.LoraConfig(r=3, target_modules={'q_proj'})).r == 3
