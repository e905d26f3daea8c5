"""Loading of an engine, which may share its passes or its frozen weights with other processes."""

import importlib
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import device_mesh as torch_meshes

from twinkle.infra import DeviceMesh, NotSupportedYet, process_count
from twinkle.model.engine.torch_pass_group import TorchPassGroup
from twinkle.model.engine.trainer_engine import TrainerEngine
from twinkle.nn import PackedCausalLM, UnsupportedModel, torch_device
from twinkle.nn.four_bit import NF4, quantize
from twinkle.parallel import (
    FsdpSharding,
    axis_group,
    check_divisible,
    divide_rows,
    equal_group,
    join_alone,
    join_ranks,
)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of an engine on a mesh."""

    device: str
    """Torch device. Several processes need a device without a number; with 'cuda', each process uses one GPU."""
    max_pass_tokens: int
    """See `TrainerEngine`."""
    is_megatron: bool = False
    """Whether Megatron-core runs the layers, even on a mesh without `tp` and `pp` ranks."""
    quantization: str | None = None
    """'nf4' stores the weights of linear layers in four bits; see `twinkle.nn.four_bit`."""


def load_on_mesh(
    folder: str | os.PathLike[str], mesh: DeviceMesh | None, options: EngineOptions, **load_options: Any
) -> TrainerEngine:
    """Load a model and create the engine of this process. Every process of the program must call this function.

    Megatron-core runs the layers if `tp` or `pp` ranks divide them, or if `options` requires it.

    Args:
        folder: folder of the model, with equal weights in all processes.
        mesh: result of `program_mesh`.
        options: options of the engine.
        load_options: other arguments of `PackedCausalLM.load`.

    Raises:
        ValueError: torch does not know the device or finds no GPU; the device has a number, but several processes share
            the model; or `quantization` is unknown, or is combined with `fsdp` ranks.
        UnsupportedModel: the model is not supported, its weights or rows cannot be divided as the mesh describes, or
            `prepare` or `quantization` is given although Megatron-core runs the layers.
        NotSupportedYet: Megatron-core is required on a mesh with `fsdp` or `ulysses` ranks.
        ImportError: Megatron-core is needed and not installed; the extra is 'megatron'.
    """
    device = torch_device(options.device)
    if process_count() > 1 and device.index is not None:
        raise ValueError(
            f'device {options.device!r} has a number, but {process_count()} processes share the model; leave the '
            'number out, so that each process uses a different GPU'
        )
    join_ranks(device.type)
    _refuse_axes_of_transformers(mesh, options)
    if options.is_megatron or (mesh is not None and mesh.is_model_parallel):
        return _load_megatron(folder, mesh or DeviceMesh.from_sizes(dp_size=1), options, **load_options)
    load_options = _with_quantization(load_options, options, is_divided=mesh is not None and mesh.fsdp_world_size > 1)
    row_ranks = 1 if mesh is None else mesh.ulysses_world_size
    if row_ranks > 1:
        check_divisible(folder, row_ranks)
    model = PackedCausalLM.load(
        folder, device=options.device, sharding=_sharding_of(mesh, options.device), **load_options
    )
    if mesh is not None and row_ranks > 1:
        divide_rows(model, axis_group(mesh, 'ulysses'))
    group = None
    if mesh is not None and mesh.data_world_size > 1:
        group = TorchPassGroup(equal_group(mesh, 'ulysses') if row_ranks > 1 else None)
    return TrainerEngine(model, max_pass_tokens=options.max_pass_tokens, group=group)


def _with_quantization(load_options: dict[str, Any], options: EngineOptions, *, is_divided: bool) -> dict[str, Any]:
    """Return the load options of a model whose weights are quantized after the other changes of `prepare`."""
    if options.quantization is None:
        return load_options
    if options.quantization != NF4:
        raise ValueError(f"quantization must be '{NF4}' or None, got {options.quantization!r}")
    if is_divided:
        raise ValueError('quantization does not compose with fsdp; use data parallelism, or leave quantization out')
    first: Any = load_options.get('prepare')

    def prepare(model: Any) -> None:
        if first is not None:
            first(model)
        quantize(model, torch.device(options.device))

    return {**load_options, 'prepare': prepare}


def _sharding_of(mesh: DeviceMesh | None, device: str) -> FsdpSharding | None:
    """Return the FSDP sharding of the weights over the mesh; None if every rank has all weights."""
    if mesh is None or mesh.fsdp_world_size == 1:
        return None
    # The ranks of the program's mesh ascend along `dp`, then `fsdp`, then `ulysses`. Ranks that divide the rows of a
    # pass also divide the weights.
    ranks = torch.arange(mesh.world_size).view(mesh.dp_world_size, -1)
    axes = ('replicate', 'shard')
    return FsdpSharding(torch_meshes.DeviceMesh(torch.device(device).type, ranks, mesh_dim_names=axes))


def _refuse_axes_of_transformers(mesh: DeviceMesh | None, options: EngineOptions) -> None:
    axes = ('fsdp', 'ulysses')
    found = [axis for axis in axes if options.is_megatron and mesh is not None and mesh.axis_size(axis) > 1]
    if found:
        raise NotSupportedYet(f'MegatronModel does not support {found[0]}_size; use dp_size, tp_size and pp_size')


def _load_megatron(
    folder: str | os.PathLike[str], mesh: DeviceMesh, options: EngineOptions, **load_options: Any
) -> TrainerEngine:
    """Load this rank's part of a model that Megatron-core runs."""
    if options.quantization is not None:
        raise UnsupportedModel('the Megatron backend does not support quantization; leave it out')
    if load_options.pop('prepare', None) is not None:
        raise UnsupportedModel('the Megatron backend does not support patches; leave them out')
    library = _import_megatron()
    if process_count() == 1:
        join_alone()
    ranks = library.MegatronRanks.of(mesh)
    with _ignored_warnings():
        model = library.MegatronCausalLM.load(folder, ranks, device=options.device, **load_options)
    group = TorchPassGroup(ranks.data) if ranks.data.size() > 1 else None
    return TrainerEngine(model, max_pass_tokens=options.max_pass_tokens, group=group)


def _import_megatron() -> Any:
    """Return `twinkle.parallel.megatron`.

    Raises:
        ImportError: Megatron-core is not installed.
    """
    try:
        with _ignored_warnings():
            return importlib.import_module('twinkle.parallel.megatron')
    except ModuleNotFoundError as error:
        if not (error.name or '').startswith('megatron'):
            raise
        raise ImportError(
            "a mesh with tp_size or pp_size, and MegatronModel, need Megatron-core; install the extra 'megatron'"
        ) from error


@contextmanager
def _ignored_warnings() -> Iterator[None]:
    """Ignore warnings: Megatron-core warns about missing libraries for features that are not used here."""
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        yield
