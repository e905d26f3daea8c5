"""Observations that must be equal in every run: the responses and the final state."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from safetensors.numpy import load_file

from twinkle.api.model.v1 import adapter_pb2, operation_result_pb2
from twinkle_client import Error

TIME_METRICS = ('elapsed_seconds', 'tokens_per_second', 'steps_per_second')
"""Metrics that measure time and therefore differ between runs."""


@dataclass
class Observation:
    """Responses and final state of one adapter, as its client observed them."""

    responses: list[str] = field(default_factory=list[str])
    """The result or the error of each operation, in order."""
    final: dict[str, str] = field(default_factory=dict[str, str])
    """Final state by name: the properties of the adapter and each saved tensor."""

    def differences(self, expected: 'Observation') -> list[str]:
        """Return the differences from the run without faults, one line each."""
        lines: list[str] = []
        for number, (actual, reference) in enumerate(zip(self.responses, expected.responses, strict=False), start=1):
            if actual != reference:
                lines.append(f'operation {number}: {actual}, undisturbed {reference}')
        if len(self.responses) != len(expected.responses):
            lines.append(f'{len(self.responses)} responses, undisturbed {len(expected.responses)}')
        for name in sorted(self.final.keys() | expected.final.keys()):
            actual, reference = self.final.get(name, 'missing'), expected.final.get(name, 'missing')
            if actual != reference:
                lines.append(f'{name}: {actual}, undisturbed {reference}')
        return lines


def describe_result(name: str, result: operation_result_pb2.OperationResult) -> str:
    """Return a result as text for bitwise comparison, without fields that vary between runs."""
    outcome = operation_result_pb2.OperationResult()
    outcome.CopyFrom(result)
    for transient in ('adapter_id', 'receipt', 'is_replayed'):
        outcome.ClearField(transient)
    if outcome.HasField('save'):
        # The path contains the id of the run, and so do some files, whose sizes therefore differ.
        outcome.save.Clear()
    if outcome.HasField('metric'):
        for metric in TIME_METRICS:
            outcome.metric.values.pop(metric, None)
    data = outcome.SerializeToString(deterministic=True)
    return f'{name} {_short(outcome)} {hashlib.blake2b(data, digest_size=8).hexdigest()}'


def describe_error(name: str, error: Error) -> str:
    """Return the error of an operation as text."""
    return f'{name} {error.code.name} {error.reason}'


def describe_adapter(adapter: adapter_pb2.Adapter) -> dict[str, str]:
    """Return the properties of an adapter that are equal in every run."""
    properties = adapter_pb2.Adapter()
    properties.CopyFrom(adapter)
    # `is_parked` depends on the adapters in memory, which differ after a restart.
    for transient in ('adapter_id', 'create_time', 'update_time', 'is_parked'):
        properties.ClearField(transient)
    properties.checkpoint_path = adapter.checkpoint_path.replace(adapter.adapter_id, 'run')
    return {
        'step_count': str(adapter.step_count),
        'sequence_number': str(adapter.sequence_number),
        'version': str(adapter.version),
        'adapter': text_format.MessageToString(properties, as_one_line=True),
    }


def describe_folder(folder: Path) -> dict[str, str]:
    """Return a digest of every tensor of a checkpoint, including those of the optimizer."""
    digests: dict[str, str] = {}
    for path in sorted(folder.rglob('*.safetensors')):
        tensors: Mapping[str, Any] = load_file(path)
        for name, values in tensors.items():
            digest = hashlib.blake2b(values.tobytes(), digest_size=8).hexdigest()
            digests[f'{path.name}:{name}'] = f'{values.dtype}{list(values.shape)} {digest}'
    return digests


def _short(result: operation_result_pb2.OperationResult) -> str:
    if result.HasField('forward'):
        return f'loss={result.forward.loss!r} labels={result.forward.label_count}'
    return text_format.MessageToString(result, as_one_line=True)
