"""Tests that patches have the effect of the model's configuration and are undone bitwise."""

import json
from typing import ClassVar

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from fixtures.tiny_model import MAX_POSITIONS, build_tiny_model
from twinkle.component import InvalidComponentOptions, UnknownComponent
from twinkle.nn import AdapterSpan, PackedCausalLM, SequenceSpan
from twinkle.nn.attention import IMPLEMENTATION
from twinkle.patch import (
    PATCHES,
    Patch,
    PatchError,
    RopeScalingPatch,
    apply_context,
    apply_patch,
    apply_patches,
    patches_of,
    undo_patches,
)
from twinkle.patch.versions import release_numbers

IDS = torch.arange(40)[None] + 3


@pytest.fixture(params=['llama', 'qwen3'])
def folder(request, tmp_path):
    """Folder of a tiny model of each family."""
    return build_tiny_model(tmp_path / 'model', family=request.param)


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


def logits(model):
    """Return the logits of a sequence."""
    with torch.no_grad():
        return model(input_ids=IDS).logits


def configured(folder, **rope):
    """Return the model loaded with rope scaling in its configuration."""
    config = json.loads((folder / 'config.json').read_text())
    config['rope_parameters'] |= {**rope, 'original_max_position_embeddings': MAX_POSITIONS}
    config['max_position_embeddings'] = int(rope['factor'] * MAX_POSITIONS)
    (folder / 'config.json').write_text(json.dumps(config))
    return load(folder)


@pytest.mark.parametrize('rope_type', ['yarn', 'linear'])
def test_scaled_positions_are_those_of_the_models_own_configuration(folder, rope_type):
    """A patched model has bitwise the same logits, and the same maximum length, as a model configured with scaling."""
    model = load(folder)
    plain = logits(model)
    apply_patch(model, 'RopeScalingPatch', factor=4.0, rope_type=rope_type)
    own = configured(folder, rope_type=rope_type, factor=4.0)
    assert torch.equal(logits(model), logits(own))
    assert not torch.equal(logits(model), plain)
    assert model.config.max_position_embeddings == own.config.max_position_embeddings == 4 * MAX_POSITIONS


def test_undoing_restores_the_model_bitwise(folder):
    """A model is restored bitwise at the end of the block, even if the block raises."""
    model = load(folder)
    plain, config = logits(model), model.config.to_dict()
    with apply_context(model, RopeScalingPatch, factor=2):
        assert not torch.equal(logits(model), plain)
    assert torch.equal(logits(model), plain)
    with pytest.raises(KeyError), apply_context(model, RopeScalingPatch, factor=2):
        raise KeyError
    assert torch.equal(logits(model), plain)
    assert model.config.to_dict() == config


def test_adapters_are_built_on_the_patched_model(folder):
    """The packed path supports the longer sequences of a patch, with the results of the patched model."""
    model = load(folder)
    apply_patch(model, RopeScalingPatch(2.0))
    expected = logits(model)[0]
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=IMPLEMENTATION)
    packed = PackedCausalLM(RopeScalingPatch(2.0)(plain))
    assert packed.max_position_embeddings == 2 * MAX_POSITIONS
    count = IDS.shape[1]
    with torch.no_grad():
        hidden = packed.hidden(
            IDS[0],
            torch.arange(count),
            sequences=[SequenceSpan(0, count)],
            adapters=[AdapterSpan(0, count, None)],
        )
        torch.testing.assert_close(packed.logits(hidden), expected, rtol=1e-4, atol=1e-4)


class Breaking(Patch):
    """Patch that refuses every model."""

    def apply(self, model):
        raise PatchError('Breaking', 'refuses')

    def undo(self, model):
        raise AssertionError


def test_refused_patch_undoes_the_previous_ones(folder):
    """If the second of two patches is refused, the first patch is undone."""
    model = load(folder)
    plain = logits(model)
    twice = [('RopeScalingPatch', {'factor': 2.0}), ('RopeScalingPatch', {'factor': 3.0})]
    with pytest.raises(PatchError):
        apply_patches(model, twice)
    assert torch.equal(logits(model), plain)
    undo_patches(apply_patches(model, twice[:1]))
    assert torch.equal(logits(model), plain)


def test_failing_patch_undoes_the_others(folder):
    """If a patch raises any exception, the other patches of the call are undone."""

    class Crashing(RopeScalingPatch):
        def apply(self, model):
            raise RuntimeError(type(model).__name__)

    model = load(folder)
    plain = logits(model)
    with pytest.raises(RuntimeError):
        apply_patches(model, [('RopeScalingPatch', {'factor': 2.0}), (Crashing, {'factor': 2.0})])
    assert (patches_of(model), torch.equal(logits(model), plain)) == ((), True)
    with (
        apply_context(model, RopeScalingPatch, factor=2),
        pytest.raises(RuntimeError),
        apply_context(model, Crashing(2)),
    ):
        raise AssertionError
    assert (patches_of(model), torch.equal(logits(model), plain)) == ((), True)


def test_a_patch_is_in_one_model_at_a_time(folder):
    """A patch cannot be applied to a second model, or undone before it is applied; a refusal reaches the caller."""
    patch = RopeScalingPatch(2.0)
    with pytest.raises(PatchError):
        patch.unpatch()
    patch(load(folder))
    with pytest.raises(PatchError):
        patch(load(folder))
    patch.unpatch()
    assert not patch.is_applied
    with pytest.raises(PatchError):
        apply_patch(load(folder), Breaking())


def test_models_that_cannot_be_scaled_are_refused(folder):
    """Models without rotary embeddings, or with scaled rotary embeddings, are refused."""
    with pytest.raises(PatchError):
        apply_patch(GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=9)), RopeScalingPatch(2.0))
    with pytest.raises(PatchError):
        apply_patch(configured(folder, rope_type='linear', factor=2.0), RopeScalingPatch(2.0))


@pytest.mark.parametrize(
    'options',
    [
        {},
        {'factor': 1.0},
        {'factor': float('nan')},
        {'factor': float('inf')},
        {'factor': True},
        {'factor': '2'},
        {'factor': 2.0, 'rope_type': 'dynamic'},
        {'factor': 2.0, 'beta': 1},
    ],
)
def test_bad_options_are_refused(options):
    """Missing, invalid and unknown options are refused; the length-dependent type 'dynamic' is refused too."""
    with pytest.raises(InvalidComponentOptions):
        apply_patches(object(), [('RopeScalingPatch', options)])


def test_unknown_patches_are_refused():
    """The error about an unknown patch lists the known names."""
    with pytest.raises(UnknownComponent) as refusal:
        apply_patch(object(), 'NoSuchPatch')
    assert refusal.value.known == PATCHES.names


class Counting(Patch):
    """Patch that appends a number to a list of the model."""

    def __init__(self, number=1):
        super().__init__()
        self.number = number

    def apply(self, model):
        model.numbers.append(self.number)

    def undo(self, model):
        assert model.numbers.pop() == self.number


class ForOtherVersions(Counting):
    """Patch for a version of torch that is not installed."""

    libraries: ClassVar = {'torch': ('99.0', '99.1')}


class ForMissing(Counting):
    """Patch for a library that is not installed."""

    libraries: ClassVar = {'transformers': ('5.0', '99'), 'no-such-library-at-all': ('1.0', '2.0')}


class Numbered(torch.nn.Module):
    """Model with a list of numbers."""

    def __init__(self):
        super().__init__()
        self.numbers = []


@pytest.mark.parametrize('kind', [ForOtherVersions, ForMissing])
def test_a_patch_for_other_versions_changes_nothing(kind):
    """A patch for other versions is refused with the library's name and is not applied."""
    model, patch = Numbered(), kind()
    library = next(name for name in reversed(kind.libraries))
    with pytest.raises(PatchError, match=library):
        patch(model)
    assert (model.numbers, patch.is_applied, patches_of(model)) == ([], False, ())


def test_patches_are_undone_in_reverse_order():
    """A second application of a patch has no effect, and patches can only be undone in reverse order."""
    model, first, second = Numbered(), Counting(1), Counting(2)
    assert second(first(first(model))) is model
    assert (model.numbers, patches_of(model)) == ([1, 2], (first, second))
    with pytest.raises(PatchError, match='Counting'):
        first.unpatch()
    assert model.numbers == [1, 2]
    second.unpatch()
    first.unpatch()
    assert (model.numbers, patches_of(model)) == ([], ())
    first(Numbered())


def test_block_undoes_the_patches_applied_inside():
    """A block undoes its patch and the patches that are applied inside it, even if it raises."""
    model, outer = Numbered(), Counting(0)
    outer(model)

    def fail_inside():
        with apply_context(model, Counting, number=1):
            apply_patch(model, Counting(2))
            assert model.numbers == [0, 1, 2]
            apply_patch(model, ForOtherVersions)

    with pytest.raises(PatchError, match='torch'):
        fail_inside()
    assert (model.numbers, patches_of(model)) == ([0], (outer,))


@pytest.mark.parametrize(
    ('lower', 'higher'), [('5.9', '5.16.1'), ('5.16', '5.16.1'), ('2.12.1', '2.13.0+cpu'), ('5.19.9', '5.20.0rc1')]
)
def test_versions_compare_by_their_numbers(lower, higher):
    """Versions compare by their release numbers; a text without numbers is refused."""
    assert release_numbers(lower) < release_numbers(higher)
    with pytest.raises(ValueError, match='version'):
        release_numbers('main')
