"""How an engine begins, and what it is said to be able to."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from services.kit.server_facts import BaseModelFacts, ServerFacts, versioned
from twinkle.hub import resolve_model
from twinkle.loss import LOSSES
from twinkle.metric import METRICS
from twinkle.model.engine import TrainerEngine
from twinkle.module import optimizer_names, scheduler_names
from twinkle.nn import PackedCausalLM
from twinkle.patch import apply_patches
from twinkle.processor import PROCESSORS
from twinkle.template import template_names


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """What is loaded, and its bounds."""

    base_model: str
    """Hub id, alias or folder; also the name it goes by."""
    dtype: str = 'float32'
    """Of the frozen weights, by torch's name."""
    device: str = 'cpu'
    """torch's name of it."""
    thread_count: int = 0
    """Threads torch may use in this process; 0 leaves it to torch."""
    batch_tokens: int = 65536
    """Larger batches are refused."""
    pass_tokens: int = 1024
    """Of one pass of the model; larger batches take several."""
    lora_rank: int = 256
    """Told to callers; the application refuses higher ones."""
    loss_plugins: tuple[str, ...] = ()
    """Losses of installed packages that may be chosen, by the names of their entry points."""
    patches: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Any])
    """Changes to the base model as it is loaded: options by name, applied in order."""


def load_engine(options: LoadOptions) -> TrainerEngine:
    """Load the model.

    Raises:
        ModelNotFound: the id resolves to nothing.
        UnsupportedModel: the architecture cannot be run.
        UnknownComponent: no installed package offers a plugin that is allowed.
        InvalidComponent: one is no loss, or takes the name of another.
        ValueError: a patch is unknown, or does not fit the model.
    """
    LOSSES.load_plugins(options.loss_plugins)
    # The log is the service's own; a progress bar would be noise in it.
    disable_progress_bar()
    if options.thread_count:
        torch.set_num_threads(options.thread_count)
    model = PackedCausalLM.load(
        resolve_model(options.base_model),
        dtype=options.dtype,
        device=options.device,
        prepare=lambda model: apply_patches(model, list(options.patches.items())),
    )
    return TrainerEngine(model, max_pass_tokens=options.pass_tokens)


def facts_of(options: LoadOptions, model: PackedCausalLM) -> ServerFacts:
    """Return what callers are told."""
    base_model = BaseModelFacts(
        base_model=options.base_model,
        context_tokens=model.max_position_embeddings,
        vocabulary_size=model.vocab_size,
        parameter_count=model.parameter_count,
        dtype=options.dtype,
        is_trainable=True,
        patches=options.patches,
    )
    return ServerFacts(
        base_models=[base_model],
        components=_components(),
        batch_tokens=options.batch_tokens,
        lora_rank=options.lora_rank,
        engine_version=versioned('torch'),
    )


def _components() -> dict[str, tuple[str, ...]]:
    return {
        'loss': LOSSES.names,
        'lr_scheduler': scheduler_names(),
        'metric': METRICS.names,
        'optimizer': optimizer_names(),
        'processor': PROCESSORS.names,
        'template': template_names(),
    }
