"""Every causal language model of transformers isolates the tenants of a pass, or is refused at load time."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from fixtures import isolation
from fixtures.architecture_variants import VARIANTS
from fixtures.architectures import NotTiny, architectures, build_tiny, check_as_accelerator
from fixtures.tiers import mostly_slow
from twinkle.data_format import LoraConfig
from twinkle.nn import AdapterSpan, LoraWeights, PackedCausalLM, SequenceSpan, UnsupportedModel

# fmt: off
SUPPORTED = frozenset({
    'afmoe', 'apertus', 'arcee', 'aria_text', 'axk1', 'biogpt', 'bitnet', 'cohere', 'cohere2', 'cohere2_moe', 'ctrl',
    'cwm', 'deepseek_v2', 'deepseek_v3', 'dots1', 'ernie4_5', 'ernie4_5_moe', 'exaone4', 'exaone_moe', 'flex_olmo',
    'fuyu', 'gemma', 'gemma3', 'gemma3_text', 'gemma3n_text', 'gemma4', 'gemma4_text', 'gemma4_unified',
    'gemma4_unified_text', 'glm', 'glm4', 'glm4_moe', 'glm4_moe_lite', 'got_ocr2', 'gpt_bigcode', 'gpt_neox', 'granite',
    'granitemoe', 'granitemoeshared', 'helium', 'hunyuan_v1_dense', 'hunyuan_v1_moe', 'hy_v3', 'hyperclovax', 'jais2',
    'laguna', 'lfm2', 'llama', 'mellum', 'minicpm3', 'minimax_m2', 'minimax_m3_vl_text', 'ministral', 'ministral3',
    'mistral', 'mixtral', 'nanochat', 'olmo', 'olmo2', 'olmo3', 'olmoe', 'opt', 'persimmon', 'phi', 'phi3',
    'phi4_multimodal', 'qwen2', 'qwen2_moe', 'qwen3', 'qwen3_5', 'qwen3_5_moe', 'qwen3_5_moe_text', 'qwen3_5_text',
    'qwen3_moe', 'qwen3_next', 'seed_oss', 'smollm3', 'solar_open', 'starcoder2', 'whisper', 'youtu',
})
"""`model_type` of the architectures that run."""
NOT_BUILT = frozenset({
    'blt', 'cohere_compass_text', 'dbrx', 'gemma3n', 'gemma4_assistant', 'gemma4_unified_assistant', 'musicgen',
    'musicgen_melody',
})
"""`model_type` of the architectures that cannot be built from `fixtures.architectures.SIZES`."""
NOT_BITWISE = frozenset({'jetmoe', 'longcat_flash'})
"""`model_type` of the architectures that are refused on CPUs on which their gradients depend on the pack."""
REFUSED_VARIANTS = frozenset({
    'gemma2 with capped attention', 'gemma3_text in both directions', 'lfm2 with convolutions',
    'llama with dynamic positions', 'llama with longrope',
})
"""Keys of `VARIANTS` whose models are refused."""
COMPOSITE = ('gemma3', 'gemma4', 'qwen3_5', 'qwen3_5_moe')
"""Architectures with towers for other media; their folders are loaded as text models."""
IN_SHORT_CHECK = frozenset({
    'bloom', 'deepseek_v3', 'gemma3_text', 'gpt_oss', 'gptj', 'mamba', 'qwen3_5_text', 'qwen3_moe',
    'gemma3_text with capped logits', 'granite with scales', 'lfm2 with convolutions', 'llama with yarn',
    'qwen3_5_text without attention',
})
"""Cases that are not marked as slow."""
# fmt: on
OWN_LENGTHS = (37, 3)
"""Lengths of the sequences of the tenant under test."""
VOCABULARY = 100


@pytest.mark.filterwarnings('ignore::DeprecationWarning')
@pytest.mark.parametrize(
    'model_type',
    [name if name in IN_SHORT_CHECK else pytest.param(name, marks=pytest.mark.slow) for name in architectures()],
)
def test_tenants_of_a_pass_are_isolated_or_the_model_is_refused(model_type: str, tmp_path: Path) -> None:
    """A tenant's results equal those of transformers and do not depend on other tenants, or the model is refused."""
    try:
        plain = build_tiny(model_type, tmp_path)
    except NotTiny:
        if model_type not in NOT_BUILT:
            raise
        return
    assert model_type not in NOT_BUILT
    is_supported = model_type in SUPPORTED or (model_type in NOT_BITWISE and is_loaded(tmp_path))
    check_tenants(plain, tmp_path, is_supported=is_supported)


@pytest.mark.filterwarnings('ignore::DeprecationWarning')
@pytest.mark.parametrize(
    'name', [name if name in IN_SHORT_CHECK else pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS]
)
def test_mechanisms_of_an_architecture_are_isolated_or_refused(name: str, tmp_path: Path) -> None:
    """Variants with scales, biases, windows, other positions and other mechanisms isolate tenants or are refused."""
    plain = build_tiny(VARIANTS[name][0], tmp_path, VARIANTS[name][1])
    check_tenants(plain, tmp_path, is_supported=name not in REFUSED_VARIANTS)


@pytest.mark.parametrize('model_type', mostly_slow(COMPOSITE))
def test_folder_with_towers_is_loaded_as_a_text_model(model_type: str, tmp_path: Path) -> None:
    """The text model of a folder with towers has the folder's weights, and its tenants are isolated."""
    plain = build_tiny(model_type, tmp_path, loader=transformers.AutoModelForImageTextToText)
    assert json.loads((tmp_path / 'config.json').read_text())['model_type'] == model_type
    check_tenants(plain, tmp_path, is_supported=True)


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore::DeprecationWarning')
@pytest.mark.parametrize('name', sorted({*SUPPORTED, *VARIANTS} - REFUSED_VARIANTS))
def test_random_mixes_leave_each_tenant_bitwise_unchanged(name: str, tmp_path: Path) -> None:
    """Tenants with random ranks, dropout, lengths and tokens get bitwise the same results together and alone."""
    model_type, fields = VARIANTS.get(name, (name, {}))
    build_tiny(model_type, tmp_path, fields)
    model = PackedCausalLM.load(tmp_path)
    mixes = (isolation.violations(model, seed, longest=100, targets=['all-linear']) for seed in range(3))
    assert [violation for mix in mixes for violation in mix] == []


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore::DeprecationWarning')
@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
@pytest.mark.parametrize('model_type', sorted(set(architectures()) - NOT_BUILT))
def test_the_check_of_an_accelerator_decides_the_same_in_half_precision(
    model_type: str, dtype: str, tmp_path: Path
) -> None:
    """Rounding does not hide an architecture that mixes sequences, or cause the refusal of a correct architecture."""
    build_tiny(model_type, tmp_path)
    is_right = model_type in SUPPORTED | NOT_BITWISE
    with nullcontext() if is_right else pytest.raises(UnsupportedModel, match='is not supported'):
        check_as_accelerator(tmp_path, dtype=dtype)


def is_loaded(folder: Path) -> bool:
    """Return whether the model in a folder is loaded and not refused."""
    try:
        PackedCausalLM.load(folder)
    except UnsupportedModel:
        return False
    return True


def check_tenants(plain: Any, folder: Path, *, is_supported: bool) -> None:
    """Compare a tenant in a mix with the tenant alone and with transformers, or check the refusal.

    Args:
        plain: model of transformers.
        folder: folder of the model.
        is_supported: whether the model may be loaded.
    """
    if not is_supported:
        with pytest.raises(UnsupportedModel, match=type(plain).__name__):
            PackedCausalLM.load(folder)
        return
    model = PackedCausalLM.load(folder)
    own = tokens(OWN_LENGTHS, seed=0)
    alone = Tenant.run(model, own, before=[], after=[])
    for seed in (1, 2, 3):
        others = tokens((20 * seed, 1, 9), seed=seed)
        mixed = Tenant.run(model, own, before=others[:1], after=others[1:])
        assert torch.equal(mixed.logits_TV, alone.logits_TV)
        assert all(torch.equal(*pair) for pair in zip(mixed.gradients, alone.gradients, strict=True))
    assert any(gradient.any() for gradient in alone.gradients)
    base = Tenant.run(model, own, before=others, after=[], is_adapted=False)
    expected = logits_of(plain, own)
    # Grouped products of experts do not support float64.
    plain.set_experts_implementation('eager')
    exact = logits_of(plain.double(), own)
    # The pack's distance from the exact result may be that of transformers in float32, plus 1e-5.
    allowed = 1e-5 + 1e-5 * exact.abs() + (expected - exact).abs()
    assert ((base.logits_TV - exact).abs() <= allowed).all()


def logits_of(plain: Any, own: list[torch.Tensor]) -> torch.Tensor:
    """Return the logits that transformers computes for each sequence alone, float [tokens, vocabulary]."""
    with torch.no_grad():
        return torch.cat([plain(ids[None], use_cache=False).logits[0] for ids in own])


class Tenant:
    """Results of one tenant's sequences in a pack with other tenants' sequences.

    Args:
        logits_TV: float32 [tokens, vocabulary].
        gradients: gradients of the adapter's parameters.
    """

    def __init__(self, logits_TV: torch.Tensor, gradients: list[torch.Tensor]) -> None:
        self.logits_TV = logits_TV
        self.gradients = gradients

    @classmethod
    def run(
        cls,
        model: PackedCausalLM,
        own: list[torch.Tensor],
        *,
        before: list[torch.Tensor],
        after: list[torch.Tensor],
        is_adapted: bool = True,
    ) -> 'Tenant':
        """Run `own` in a pack between other sequences; each tenant has its own adapter."""
        adapter, other = (adapter_of(model, seed=seed) for seed in (1, 2))
        begin, rows = sum(map(len, before)), sum(map(len, own))
        total = begin + rows + sum(map(len, after))
        bounds = [
            (0, begin, other),
            (begin, begin + rows, adapter if is_adapted else None),
            (begin + rows, total, other),
        ]
        spans = [AdapterSpan(*bound) for bound in bounds if bound[0] < bound[1]]
        hidden = hidden_of(model, [*before, *own, *after], spans)[begin : begin + rows]
        logits = model.logits(hidden)
        loss = model.label_logprobs(hidden, torch.cat(own).flip(0)).sum()
        gradients = gradients_of(loss, adapter) if is_adapted else []
        return cls(logits.detach(), gradients)


def gradients_of(loss: torch.Tensor, adapter: LoraWeights) -> list[torch.Tensor]:
    """Return the gradients of all parameters, with zeros for layers that the model does not use."""
    return list(torch.autograd.grad(loss, list(adapter.parameters()), materialize_grads=True))


def adapter_of(model: PackedCausalLM, *, seed: int) -> LoraWeights:
    """Return a trainable adapter of all linear layers, with nonzero B factors so that it changes the results."""
    weights = LoraWeights.create(model.layers, LoraConfig(r=2), seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for factors in weights.factors.values():
        factors.b.copy_(0.1 * torch.randn(factors.b.shape, generator=generator))
    return weights.requires_grad_(is_trainable=True)


def hidden_of(model: PackedCausalLM, sequences: list[torch.Tensor], adapters: list[AdapterSpan]) -> Any:
    """Return the hidden states of a pack of sequences, float [tokens, width]."""
    spans: list[SequenceSpan] = []
    for ids in sequences:
        begin = spans[-1].end_row if spans else 0
        spans.append(SequenceSpan(begin, begin + len(ids)))
    positions = torch.cat([torch.arange(len(ids)) for ids in sequences])
    return model.hidden(torch.cat(sequences), positions, sequences=spans, adapters=adapters)


def tokens(lengths: tuple[int, ...], *, seed: int) -> list[torch.Tensor]:
    """Return random token ids of each length."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in lengths]
