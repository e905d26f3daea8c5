"""Loads the engine and describes the server's capabilities."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from twinkle.hub import resolve_model
from twinkle.infra import DeviceMesh, program_mesh
from twinkle.loss import LOSSES
from twinkle.metric import METRICS
from twinkle.model.engine import TrainerEngine
from twinkle.model.engine.mesh_engine import EngineOptions, load_on_mesh
from twinkle.module import optimizer_names, scheduler_names
from twinkle.nn import PackedModel
from twinkle.patch import apply_patches
from twinkle.processor import PROCESSORS
from twinkle.template import template_names
from twinkle_services.kit.server_facts import BaseModelFacts, ServerFacts, versioned


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Options of the engine: the model to load, its devices and its limits."""

    base_model: str
    """Hub id, alias or folder; also the name that clients request."""
    dtype: str = 'float32'
    """Torch dtype of the frozen weights, or 'auto'; see `twinkle.nn.chosen_dtype`."""
    device: str = 'cpu'
    """Torch device."""
    thread_count: int = 0
    """Number of torch threads in this process; 0 uses torch's default."""
    batch_tokens: int = 65536
    """Maximum number of tokens in a batch."""
    pass_tokens: int = 1024
    """Maximum number of computed rows per pass through the model; larger batches take several passes."""
    is_checkpointed: bool = False
    """Whether the backward pass recomputes each layer's activations."""
    gpu_memory_share: float = 1.0
    """Share of the memory of a GPU that this process may use after the model is loaded."""
    quantization: str | None = None
    """'nf4' stores the weights of linear layers in four bits; None stores them in `dtype`."""
    is_tf32_allowed: bool = False
    """Whether float32 products on a GPU round their inputs to TF32."""
    lora_rank: int = 256
    """Maximum LoRA rank, reported to callers and enforced by the application."""
    loss_plugins: tuple[str, ...] = ()
    """Additional losses that tenants may choose: names of installed entry points, or plugin ids."""
    patches: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Any])
    """Patches of the base model, as a mapping from name to options, in the order in which they are applied."""
    is_megatron: bool = False
    """Whether Megatron-core runs the layers."""
    mesh: DeviceMesh | None = None
    """Processes that share the model. None: all processes of the program, with data parallelism only."""
    silence_seconds: float = 30.0
    """Time without a heartbeat after which a process counts as lost."""


def load_engine(options: LoadOptions) -> TrainerEngine:
    """Load the model and its engine. Collective: every process of the program must call this function.

    Raises:
        ModelNotFound, HubUnreachable: The model does not exist, or cannot be downloaded.
        UnsupportedModel: The architecture, or its combination with the mesh or the patches, is not supported.
        UnknownComponent, HubError: A plugin is not installed, or cannot be downloaded.
        InvalidComponent, PluginRefused: A plugin is not a loss, its name is taken, or it has a different digest.
        ValueError: A patch is unknown or does not fit the model, or the mesh or the device does not fit the processes.
        NotSupportedYet: An axis of the mesh is not supported.
        ImportError: Megatron-core is needed and not installed.
        RuntimeError: Another process of the program cannot be reached.
    """
    mesh = program_mesh(options.mesh)
    LOSSES.load_plugins(options.loss_plugins)
    # Progress bars would clutter the service's log.
    disable_progress_bar()
    if options.thread_count:
        torch.set_num_threads(options.thread_count)
    engine = load_on_mesh(
        resolve_model(options.base_model),
        mesh,
        EngineOptions(
            device=options.device,
            max_pass_tokens=options.pass_tokens,
            is_megatron=options.is_megatron,
            quantization=options.quantization,
        ),
        dtype=options.dtype,
        is_checkpointed=options.is_checkpointed,
        prepare=(lambda model: apply_patches(model, list(options.patches.items()))) if options.patches else None,
    )
    if torch.device(options.device).type == 'cuda':
        _configure_gpu(options, engine.model.device)
    return engine


def _configure_gpu(options: LoadOptions, device: torch.device) -> None:
    torch.cuda.set_per_process_memory_fraction(options.gpu_memory_share, device)
    if options.is_tf32_allowed:
        # The model is loaded first, because loading compares float32 results, with tolerances that TF32 exceeds.
        torch.set_float32_matmul_precision('high')


def facts_of(options: LoadOptions, model: PackedModel) -> ServerFacts:
    """Return the capabilities reported to callers."""
    base_model = BaseModelFacts(
        base_model=options.base_model,
        context_tokens=model.max_position_embeddings,
        vocabulary_size=model.vocab_size,
        parameter_count=model.parameter_count,
        dtype=model.dtype_name,
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
