"""Tests of optimizers: updates, groups, refused options, and saving and restoring their state."""

import importlib.util
import json

import pytest
import torch

from twinkle.component import InvalidComponentOptions, UnknownComponent, near_misses
from twinkle.module import build_optimizer, load_optimizer_state, optimizer_names, optimizer_state
from twinkle.module.optimizer_state import OptimizerState
from twinkle.module.parameter_groups import matches

HAS_8BIT = importlib.util.find_spec('bitsandbytes') is not None
NAMES = [name for name in optimizer_names() if HAS_8BIT or name != 'AdamW8bit']
LAYERS = ('model.layers.0.q_proj', 'model.layers.0.v_proj', 'model.layers.10.q_proj')


@pytest.mark.parametrize(
    ('name', 'suggestion'), [('adamw', 'AdamW'), ('Adamw', 'AdamW'), ('AdaDelta', 'Adadelta'), ('Adam W', 'AdamW')]
)
def test_misspelled_name_gets_a_suggestion(name, suggestion):
    """The error for a misspelled optimizer name suggests the nearest name; an unrelated name gets no suggestion."""
    with pytest.raises(UnknownComponent) as raised:
        build_optimizer(name, lora_parameters(), {})
    assert near_misses(raised.value.name, raised.value.known)[0] == suggestion
    assert near_misses('MegatronDistributedOptimizer', optimizer_names()) == []


def lora_parameters(seed=0):
    """Return A [2, 6] and B [5, 2] of three layers and a value head [1, 6], by their names."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        f'base_model.model.{layer}.lora_{part}.weight': shape
        for layer in LAYERS
        for part, shape in (('A', (2, 6)), ('B', (5, 2)))
    }
    shapes['value_head.weight'] = (1, 6)
    return {name: torch.randn(shape, generator=generator).requires_grad_() for name, shape in shapes.items()}


def train(parameters, optimizer, steps, *, seed):
    """Run steps with random gradients that depend on a seed."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for parameter in parameters.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


@pytest.mark.parametrize('name', NAMES)
def test_every_optimizer_changes_every_parameter(name):
    """Every optimizer updates matrices and single rows."""
    parameters, untouched = lora_parameters(), lora_parameters()
    train(parameters, build_optimizer(name, parameters, {'lr': 0.1}), 2, seed=1)
    assert not any(torch.equal(parameters[path], untouched[path]) for path in parameters)


@pytest.mark.parametrize('name', NAMES)
def test_every_optimizer_is_restored_bitwise_from_json(name):
    """A state that is restored from tensors and JSON gives bitwise the same next steps."""
    options = {'lr': 0.01, 'groups': [{'pattern': 'lora_B', 'lr': 0.1}]}
    parameters = lora_parameters()
    optimizer = build_optimizer(name, parameters, options)
    train(parameters, optimizer, 3, seed=1)
    saved = optimizer_state(optimizer)
    tensors = {key: tensor.clone() for key, tensor in saved.tensors.items()}
    numbers = json.loads(json.dumps(saved.numbers, allow_nan=False))
    others = {path: parameter.detach().clone().requires_grad_() for path, parameter in parameters.items()}
    restored = build_optimizer(name, others, options)
    load_optimizer_state(restored, OptimizerState(tensors, numbers))
    for run in ((parameters, optimizer), (others, restored)):
        train(*run, 3, seed=2)
    assert all(torch.equal(parameters[path], others[path]) for path in parameters)


@pytest.mark.parametrize('name', NAMES)
def test_restored_state_is_a_copy(name):
    """Steps after a restoration do not modify the saved tensors."""
    parameters = lora_parameters()
    optimizer = build_optimizer(name, parameters, {})
    train(parameters, optimizer, 1, seed=1)
    saved = optimizer_state(optimizer)
    tensors = {key: tensor.clone() for key, tensor in saved.tensors.items()}
    restored = build_optimizer(name, parameters, {})
    load_optimizer_state(restored, OptimizerState(tensors, saved.numbers))
    copies = {key: tensor.clone() for key, tensor in tensors.items()}
    train(parameters, restored, 2, seed=2)
    assert all(torch.equal(tensors[key], copies[key]) for key in copies)


def test_state_of_other_shapes_is_refused_before_anything_changes():
    """A state with other shapes or groups is refused and changes nothing."""
    parameters = lora_parameters()
    optimizer = build_optimizer('AdamW', parameters, {})
    train(parameters, optimizer, 1, seed=1)
    saved = optimizer_state(optimizer)
    invalid = {**saved.tensors, '0.exp_avg': torch.zeros(3, 6)}
    fresh = build_optimizer('AdamW', parameters, {})
    with pytest.raises(ValueError, match='exp_avg'):
        load_optimizer_state(fresh, OptimizerState(invalid, saved.numbers))
    with pytest.raises(ValueError, match='groups'):
        load_optimizer_state(build_optimizer('AdamW', list(parameters.values())[:2], {}), saved)
    assert not fresh.state


def test_groups_give_their_parameters_their_own_options():
    """The first matching group sets a parameter's options; unmatched parameters form the first group."""
    parameters = lora_parameters()
    groups = [
        {'pattern': 'layers.0.v_proj', 'lr': 0.5, 'weight_decay': 0.0},
        {'pattern': 'lora_B', 'lr': 0.25, 'betas': [0.5, 0.6]},
    ]
    optimizer = build_optimizer('AdamW', parameters, {'lr': 0.1, 'weight_decay': 0.3, 'groups': groups})
    names = {id(parameter): name for name, parameter in parameters.items()}
    found = {
        names[id(parameter)].removeprefix('base_model.model.model.layers.').removesuffix('.weight'): (
            group['lr'],
            group['weight_decay'],
            tuple(group['betas']),
        )
        for group in optimizer.param_groups
        for parameter in group['params']
    }
    common, v, b = (0.1, 0.3, (0.9, 0.999)), (0.5, 0.0, (0.9, 0.999)), (0.25, 0.3, (0.5, 0.6))
    assert found == {
        '0.q_proj.lora_A': common,
        '0.q_proj.lora_B': b,
        '0.v_proj.lora_A': v,
        '0.v_proj.lora_B': v,
        '10.q_proj.lora_A': common,
        '10.q_proj.lora_B': b,
        'value_head': common,
    }
    assert optimizer.param_groups[0]['lr'] == 0.1


@pytest.mark.parametrize('name', NAMES)
def test_group_updates_like_a_separate_optimizer(name):
    """A parameter in a group gets bitwise the same updates as from a separate optimizer with the group's options."""
    grouped, first, second = lora_parameters(), lora_parameters(), lora_parameters()
    optimizer = build_optimizer(name, grouped, {'lr': 0.01, 'groups': [{'pattern': 'lora_B', 'lr': 0.2}]})
    train(grouped, optimizer, 3, seed=1)
    train(first, build_optimizer(name, first, {'lr': 0.01}), 3, seed=1)
    train(second, build_optimizer(name, second, {'lr': 0.2}), 3, seed=1)
    for path, parameter in grouped.items():
        assert torch.equal(parameter, (second if 'lora_B' in path else first)[path])


@pytest.mark.parametrize(
    ('pattern', 'path', 'expected'),
    [
        ('q_proj', 'model.layers.0.q_proj.lora_A.weight', True),
        ('proj', 'model.layers.0.q_proj.lora_A.weight', False),
        ('layers.1', 'model.layers.1.q_proj', True),
        ('layers.1', 'model.layers.10.q_proj', False),
        ('*_proj.lora_B', 'model.layers.10.q_proj.lora_B.weight', True),
        ('layers.*.q_proj', 'model.layers.10.q_proj', True),
        ('layers.*.q_proj', 'model.layers.10.self_attn.q_proj', False),
        ('a.b.c', 'b.c', False),
    ],
)
def test_patterns_match_whole_parts(pattern, path, expected):
    """A pattern matches whole dotted parts, so a layer number does not match a longer number."""
    assert matches(pattern, path) is expected


@pytest.mark.parametrize(
    'groups',
    [
        [{'pattern': 'k_proj', 'lr': 1.0}],
        [{'pattern': 'lora_A'}, {'pattern': 'lora_B'}, {'pattern': 'q_proj'}],
        [{'lr': 1.0}],
        [{'pattern': ''}],
        [{'pattern': 'a..b'}],
        [{'pattern': 3}],
        [{'pattern': 'lora_B', 'rate': 1.0}],
        [{'pattern': 'lora_B', 'params': []}],
        [{'pattern': 'lora_B', 'lr': -1.0}],
        [{'pattern': 'lora_B', 'betas': [0.9]}],
        [{'pattern': 'lora_B', 'lr': 1e308}],
        ['lora_B'],
        'lora_B',
        {'pattern': 'lora_B'},
        3,
    ],
)
def test_bad_groups_are_refused(groups):
    """Malformed groups, patterns without effect, and unknown or invalid options are refused."""
    with pytest.raises(InvalidComponentOptions):
        build_optimizer('AdamW', lora_parameters(), {'groups': groups})


def test_groups_need_paths():
    """Groups are refused for parameters without paths."""
    with pytest.raises(InvalidComponentOptions):
        build_optimizer('AdamW', list(lora_parameters().values()), {'groups': [{'pattern': 'lora_B'}]})


def test_muon_equals_torch_for_matrices_and_adamw_for_the_rest():
    """Matrices get bitwise the same updates as from torch's Muon, and other parameters as from torch's AdamW."""
    parameters, oracle = lora_parameters(), lora_parameters()
    optimizer = build_optimizer('Muon', parameters, {'lr': 0.02, 'weight_decay': 0.1, 'adamw_betas': [0.8, 0.9]})
    matrices = [parameter for name, parameter in oracle.items() if 'lora' in name]
    muon = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1)
    adamw = torch.optim.AdamW([oracle['value_head.weight']], lr=0.02, weight_decay=0.1, betas=(0.8, 0.9))
    train(parameters, optimizer, 3, seed=1)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        for parameter in oracle.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        muon.step()
        adamw.step()
    assert all(torch.equal(parameters[path], oracle[path]) for path in parameters)


def test_muon_calls_a_closure_with_gradients():
    """A step of Muon with a closure equals a step after the closure, and returns the closure's value."""
    first, second = lora_parameters(), lora_parameters()

    def loss_of(parameters):
        loss = sum((parameter**2).sum() for parameter in parameters.values())
        loss.backward()
        return loss

    expected = loss_of(second)
    build_optimizer('Muon', second, {'lr': 0.02}).step()
    assert build_optimizer('Muon', first, {'lr': 0.02}).step(lambda: loss_of(first)) == expected
    assert all(torch.equal(first[path], second[path]) for path in first)


@pytest.mark.parametrize('options', [{'momentun': 0.5}, {'momentum': -1.0}, {'adjust_lr_fn': 'x'}, {'ns_steps': 200}])
def test_bad_options_of_muon_are_refused(options):
    """Unknown and invalid options of Muon are refused when it is built."""
    with pytest.raises(InvalidComponentOptions):
        build_optimizer('Muon', lora_parameters(), options)


@pytest.mark.skipif(HAS_8BIT, reason='the library is installed')
def test_missing_library_is_reported_with_its_extra():
    """The error for an optimizer of a missing library names the extra to install."""
    with pytest.raises(InvalidComponentOptions, match='eight-bit'):
        build_optimizer('AdamW8bit', lora_parameters(), {})


@pytest.mark.skipif(not HAS_8BIT, reason='needs the extra eight-bit')
def test_eight_bit_moments_are_bytes_and_are_restored():
    """A matrix of 4096 elements has 8-bit moments; a restored state gives bitwise the same steps."""
    weight = torch.ones(64, 64, requires_grad=True)
    parameters = {'w': weight}
    optimizer = build_optimizer('AdamW8bit', parameters, {'lr': 0.1})
    train(parameters, optimizer, 2, seed=0)
    saved = optimizer_state(optimizer)
    assert saved.tensors['0.state1'].dtype == torch.uint8
    others = {'w': weight.detach().clone().requires_grad_()}
    restored = build_optimizer('AdamW8bit', others, {'lr': 0.1})
    load_optimizer_state(restored, OptimizerState({k: v.clone() for k, v in saved.tensors.items()}, saved.numbers))
    for run in ((parameters, optimizer), (others, restored)):
        train(*run, 2, seed=3)
    assert torch.equal(weight, others['w'])


def test_lists_become_tuples():
    """Lists as option values are converted to tuples."""
    optimizer = build_optimizer('AdamW', [torch.zeros(1, requires_grad=True)], {'betas': [0.5, 0.6]})
    assert optimizer.param_groups[0]['betas'] == (0.5, 0.6)


@pytest.mark.parametrize(
    'options',
    [
        {'betas': [0.9]},
        {'betas': 0.9},
        {'lr': 'fast'},
        {'lr': 1e308},
        {'params': [1]},
        {'differentiable': True},
        {'capturable': True},
        {'weight_decay': 1e300},
    ],
)
def test_bad_options_of_optimizers_are_refused(options):
    """Options that torch refuses, even if only at a step, are refused when the optimizer is built."""
    with pytest.raises(InvalidComponentOptions):
        build_optimizer('AdamW', [torch.zeros(1, requires_grad=True)], options)


@pytest.mark.parametrize('dampening', ['x', float('nan')])
def test_options_of_the_second_step_are_validated(dampening):
    """An option that matters only from the second step on is refused when the optimizer is built."""
    with pytest.raises(InvalidComponentOptions):
        build_optimizer('SGD', lora_parameters(), {'lr': 0.1, 'momentum': 0.9, 'dampening': dampening})


@pytest.mark.parametrize('name', ['LBFGS', 'Optimizer', 'AdamX'])
def test_unsupported_optimizers_are_unknown(name):
    """An unsupported or unknown optimizer is refused with the known names."""
    with pytest.raises(UnknownComponent) as refusal:
        build_optimizer(name, [torch.zeros(1, requires_grad=True)], {})
    assert 'AdamW' in refusal.value.known
