"""What a run is seen to do: every answer and every final state, reduced to what must be the same in each run."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from safetensors.numpy import load_file

from twinkle.api.model.v1 import adapter_pb2, operation_result_pb2
from twinkle_client import Error

CLOCKS = ('elapsed_seconds', 'tokens_per_second', 'steps_per_second')
"""Metrics that tell of time, which no two runs share."""


@dataclass
class Observation:
    """One adapter's life as its client saw it."""

    answers: list[str] = field(default_factory=list[str])
    """Of each operation in its order: the result, or how it failed."""
    final: dict[str, str] = field(default_factory=dict[str, str])
    """What is left at the end, by name: the adapter's facts and each saved tensor."""

    def differences(self, expected: 'Observation') -> list[str]:
        """Return what is not as in the undisturbed run, one line each."""
        found: list[str] = []
        for number, (was, should) in enumerate(zip(self.answers, expected.answers, strict=False), start=1):
            if was != should:
                found.append(f'operation {number}: got {was}, undisturbed {should}')
        if len(self.answers) != len(expected.answers):
            found.append(f'{len(self.answers)} answers, undisturbed {len(expected.answers)}')
        for name in sorted(self.final.keys() | expected.final.keys()):
            was, should = self.final.get(name, 'nothing'), expected.final.get(name, 'nothing')
            if was != should:
                found.append(f'{name}: {was}, undisturbed {should}')
        return found


def describe_result(name: str, result: operation_result_pb2.OperationResult) -> str:
    """Return a result as text in which floats keep every bit."""
    outcome = operation_result_pb2.OperationResult()
    outcome.CopyFrom(result)
    for transient in ('adapter_id', 'receipt', 'is_replayed'):
        outcome.ClearField(transient)
    if outcome.HasField('save'):
        # The run's id is in the path; the size counts it too, through the folder's own description.
        outcome.save.Clear()
    if outcome.HasField('metric'):
        for clock in CLOCKS:
            outcome.metric.values.pop(clock, None)
    data = outcome.SerializeToString(deterministic=True)
    return f'{name} {_short(outcome)} {hashlib.blake2b(data, digest_size=8).hexdigest()}'


def describe_error(name: str, error: Error) -> str:
    """Return how an operation failed."""
    return f'{name} {error.code.name} {error.reason}'


def describe_adapter(adapter: adapter_pb2.Adapter) -> dict[str, str]:
    """Return the facts of an adapter that every run shares."""
    facts = adapter_pb2.Adapter()
    facts.CopyFrom(adapter)
    # What is in memory differs after a restart, and is nobody's to see.
    for transient in ('adapter_id', 'create_time', 'update_time', 'is_parked'):
        facts.ClearField(transient)
    facts.checkpoint_path = adapter.checkpoint_path.replace(adapter.adapter_id, 'run')
    return {
        'step_count': str(adapter.step_count),
        'sequence_number': str(adapter.sequence_number),
        'version': str(adapter.version),
        'adapter': text_format.MessageToString(facts, as_one_line=True),
    }


def describe_folder(folder: Path) -> dict[str, str]:
    """Return a digest of every tensor of a saved checkpoint, optimizer's included."""
    found: dict[str, str] = {}
    for path in sorted(folder.rglob('*.safetensors')):
        tensors: Mapping[str, Any] = load_file(path)
        for name, values in tensors.items():
            digest = hashlib.blake2b(values.tobytes(), digest_size=8).hexdigest()
            found[f'{path.name}:{name}'] = f'{values.dtype}{list(values.shape)} {digest}'
    return found


def _short(result: operation_result_pb2.OperationResult) -> str:
    if result.HasField('forward'):
        return f'loss={result.forward.loss!r} labels={result.forward.label_count}'
    return text_format.MessageToString(result, as_one_line=True)
