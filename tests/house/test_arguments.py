"""Public arguments have an effect: the code uses each one for more than a check of its value or a log line."""

import ast
from collections.abc import Iterator, Mapping
from functools import cache

from fixtures.source_tree import modules

LIBRARY = ('sdk/python/twinkle/', 'sdk/python/twinkle_client/')
"""Packages with public arguments."""
READERS = (*LIBRARY, 'services/', 'examples/')
"""Packages that may read an attribute."""
Function = ast.FunctionDef | ast.AsyncFunctionDef

ALWAYS_PACKED = 'documented: batches are packed without padding; programs for padded batches pass it'
ONE_PROCESS = 'documented: a stream is packed in one process; larger values log a warning'
OTHER_INTERFACE = 'required by an interface of torch, vLLM or importlib'
RESULT = 'a result, for programs to read'
SHARED_SAMPLER = 'documented: weights are never merged into a sampler that tenants share; True writes a log line'
HOST_MEMORY = 'documented: transfers use the memory of the host on both platforms'
READ_BY_NAME = 'the attribute is read by getattr'
WITHOUT_EFFECT: Mapping[str, str] = {
    'twinkle.checkpoint_engine.manager.CheckpointEngineManager.__init__(platform)': HOST_MEMORY,
    'twinkle.dataset.iterable_packing.IterablePackingDataset.__init__(packing_num_proc)': ONE_PROCESS,
    'twinkle.loss.tinker.base.TinkerClippedLoss.__init__(clip_high_threshold)': READ_BY_NAME,
    'twinkle.loss.tinker.base.TinkerClippedLoss.__init__(clip_low_threshold)': READ_BY_NAME,
    'twinkle.nn.delta_net.PackedDeltaNet.forward(attention_mask)': OTHER_INTERFACE,
    'twinkle.nn.delta_net.PackedDeltaNet.forward(cache_params)': OTHER_INTERFACE,
    'twinkle.plugin.code.PluginFinder.find_spec(path)': OTHER_INTERFACE,
    'twinkle.plugin.code.PluginFinder.find_spec(target)': OTHER_INTERFACE,
    'twinkle.processor.input_processor.InputProcessor.__init__(padding_free)': ALWAYS_PACKED,
    'twinkle.processor.input_processor.InputProcessor.__init__(padding_side)': ALWAYS_PACKED,
    'twinkle.sampler.vllm.cpu_lora.add_lora_linear(_)': OTHER_INTERFACE,
    'twinkle.sampler.vllm.load.EngineStats.make(vllm_config)': OTHER_INTERFACE,
    'twinkle.sampler.vllm.load.EngineStats.record(mm_cache_stats)': OTHER_INTERFACE,
    'twinkle.sampler.vllm.penalties.ContinuedPenalties.__init__(device)': OTHER_INTERFACE,
    'twinkle.sampler.vllm.penalties.ContinuedPenalties.__init__(is_pin_memory)': OTHER_INTERFACE,
    'twinkle.sampler.vllm.penalties.ContinuedPenalties.__init__(vllm_config)': OTHER_INTERFACE,
    'twinkle.sampler.vllm.penalties.ContinuedPenaltiesV2.__init__(vllm_config)': OTHER_INTERFACE,
    'twinkle_client.checkpoint_engine.manager.CheckpointEngineManager.sync_weights(merge_and_sync)': SHARED_SAMPLER,
}
"""Arguments that the code may leave unread, with the reason."""
UNREAD_FIELDS: Mapping[str, str] = {
    'twinkle.checkpoint_engine.base_source.BaseSource.model_folder': RESULT,
    'twinkle.checkpoint_engine.manager.SyncedWeights.adapter_name': RESULT,
    'twinkle.checkpoint_engine.manager.SyncedWeights.base_size_bytes': RESULT,
    'twinkle.checkpoint_engine.merge.MergeResult.merged_layer_count': RESULT,
    'twinkle.checkpoint_engine.merge.MergeResult.is_repeat': RESULT,
    'twinkle.data_format.streams.StreamSpec.meaning': RESULT,
    'twinkle.rollout.pipeline.PipelineBatch.staleness': RESULT,
    'twinkle.rollout.staleness.FreshSamples.indexes': RESULT,
    'twinkle.rollout.tool.ToolResult.is_cut': RESULT,
    'twinkle.sampler.vllm.step_log.Step.steps_since': RESULT,
    'twinkle.sampler.vllm.step_log.Step.preempted': RESULT,
}
"""Fields of public dataclasses that the code may leave unread, with the reason."""


def test_every_public_argument_is_read() -> None:
    """Public functions read each parameter; public methods use each parameter for more than a check of its value."""
    found = {
        f'{module.name}.{name}({parameter})'
        for module in modules(*LIBRARY)
        for name, function in _public_functions(module.tree)
        for parameter in _unread_parameters(function, is_method='.' in name)
        if not _is_required_by_an_interface(name, parameter)
    }
    assert found == WITHOUT_EFFECT.keys()


def test_every_public_field_is_read() -> None:
    """Each field of a public dataclass is read outside of the checks in its constructor."""
    found = {
        f'{module.name}.{node.name}.{field.target.id}'
        for module in modules(*LIBRARY)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef) and not node.name.startswith('_') and _is_dataclass(node)
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if field.target.id not in _attributes_read()
    }
    assert found == UNREAD_FIELDS.keys()


def _public_functions(tree: ast.Module | ast.ClassDef, prefix: str = '') -> Iterator[tuple[str, Function]]:
    """Yield the public functions, methods and constructors with their qualified names."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith('_'):
            yield from _public_functions(node, f'{prefix}{node.name}.')
        elif isinstance(node, Function) and (not node.name.startswith('_') or node.name in ('__init__', '__call__')):
            yield f'{prefix}{node.name}', node


def _parameters(function: Function) -> list[str]:
    listed = function.args
    variadic = [argument for argument in (listed.vararg, listed.kwarg) if argument]
    every = [*listed.posonlyargs, *listed.args, *listed.kwonlyargs, *variadic]
    return [argument.arg for argument in every if argument.arg not in ('self', 'cls')]


def _unread_parameters(function: Function, *, is_method: bool) -> list[str]:
    """Return the parameters without effect; a function that only raises or passes is not checked."""
    statements = [node for node in function.body if not _is_constant(node)]
    if all(isinstance(node, ast.Raise | ast.Pass) for node in statements):
        return []
    reads = _effective_reads if is_method else _names_read
    read = {name for node in statements for name in reads(node)}
    return [name for name in _parameters(function) if name not in read]


def _names_read(node: ast.AST) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Load):
            yield inner.id


def _effective_reads(node: ast.AST) -> Iterator[str]:
    """Yield the names that a statement reads outside of checks, log lines and assignments to unread attributes."""
    if isinstance(node, ast.Raise) or _is_log_line(node):
        return
    if isinstance(node, ast.If) and _is_check(node):
        yield from _refused(node)
        return
    if isinstance(node, ast.Assign) and all(_is_unread_attribute(target) for target in node.targets):
        return
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        yield node.id
    for child in ast.iter_child_nodes(node):
        yield from _effective_reads(child)


def _refused(node: ast.If) -> Iterator[str]:
    """Yield the names in the conditions of a check that raises. Comparisons count only if they test for equality.

    A test for equality or truth refuses an unsupported value, which is an effect. A test of a range is not an effect.
    """
    if not any(isinstance(item, ast.Raise) for item in node.body):
        return
    parts = node.test.values if isinstance(node.test, ast.BoolOp) else [node.test]
    for part in parts:
        if not isinstance(part, ast.Compare) or isinstance(part.ops[0], ast.Eq | ast.NotEq | ast.Is | ast.IsNot):
            yield from _names_read(part)


def _is_check(node: ast.If) -> bool:
    """Return whether all branches of a condition only raise or log."""
    return all(isinstance(item, ast.Raise) or _is_log_line(item) for item in [*node.body, *node.orelse])


def _is_log_line(node: ast.AST) -> bool:
    call = node.value if isinstance(node, ast.Expr) else None
    return isinstance(call, ast.Call) and ast.unparse(call.func).startswith(('_log.', 'get_logger().', 'warnings.warn'))


def _is_unread_attribute(target: ast.expr) -> bool:
    return isinstance(target, ast.Attribute) and target.attr not in _attributes_read()


@cache
def _attributes_read() -> frozenset[str]:
    """Return the names of all attributes that the code reads outside of `__post_init__`."""
    checks = {
        id(inner)
        for module in modules(*READERS)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef) and node.name == '__post_init__'
        for inner in ast.walk(node)
    }
    return frozenset(
        node.attr
        for module in modules(*READERS)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and id(node) not in checks
    )


def _is_required_by_an_interface(name: str, parameter: str) -> bool:
    """Return whether a method with the same name in another class has the parameter, so this one must accept it."""
    class_name, _, method = name.rpartition('.')
    return bool(class_name) and method != '__init__' and len(_classes_with(method, parameter) - {class_name}) > 0


@cache
def _classes_with(method: str, parameter: str) -> frozenset[str]:
    return frozenset(
        name.rpartition('.')[0]
        for module in modules(*LIBRARY)
        for name, function in _public_functions(module.tree)
        if name.rpartition('.')[2] == method and parameter in _parameters(function)
    )


def _is_dataclass(node: ast.ClassDef) -> bool:
    return any('dataclass' in ast.unparse(decorator) for decorator in node.decorator_list)


def _is_constant(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
