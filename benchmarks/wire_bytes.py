"""Bytes on the wire for the published versions of a real training run: deltas against raw bf16.

A LoRA adapter of SmolLM2-135M is trained for fifty steps on the quick start's data. Every step produces a version that
is rounded to bf16, as `publish_version(dtype='bfloat16')` does. For each version, the delta against the previous
version is encoded, decoded and compared. A subscriber would receive the smaller of the delta and the full version.
"""

import json
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from twinkle.checkpoint_engine import PackedState, pack_state, unpack_state
from twinkle.checkpoint_engine.delta import apply_delta, encode_delta
from twinkle.checkpoint_engine.rounding import round_tensors
from twinkle.data_format import LoraConfig
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.hub import BUILT_IN_MODELS
from twinkle.model import TransformersModel
from twinkle.preprocessor import SelfCognitionProcessor

MODEL = BUILT_IN_MODELS[0]
DATA = Path(__file__).parents[1] / 'examples' / 'data' / 'self_cognition.jsonl'
STEPS = 50
BATCH_SIZE = 4
LORA_RANK = 8
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Transfer:
    """Sizes and times of the transfer of one version."""

    raw_bytes: int
    wire_bytes: int
    encode_seconds: float
    decode_seconds: float
    changed_share: float
    """Fraction of the weights that differ from the previous version."""
    is_lossless: bool


def main() -> dict[str, Any]:
    """Train, encode and decode every version, and return the figures."""
    torch.set_num_threads(1)
    versions: list[PackedState] = []
    losses: list[float] = []
    model, loader = _trainer()
    while len(versions) <= STEPS:
        for batch in loader:
            versions.append(_version(model))
            if len(versions) > STEPS:
                break
            losses.append(model.forward_backward(batch)['loss'])
            model.clip_grad_and_step()
    transfers = [_send(new, base) for base, new in pairwise(versions)]
    return {
        'model': MODEL,
        'lora_rank': LORA_RANK,
        'learning_rate': LEARNING_RATE,
        'steps': STEPS,
        'first_loss': round(losses[0], 3),
        'last_loss': round(losses[-1], 3),
        **_figures(transfers),
    }


def _figures(transfers: list[Transfer]) -> dict[str, Any]:
    raw, wire = sum(item.raw_bytes for item in transfers), sum(item.wire_bytes for item in transfers)
    return {
        'version_mib': round(transfers[0].raw_bytes / 2**20, 2),
        'wire_over_raw_bf16': round(wire / raw, 4),
        'goal': 0.4,
        'wire_over_raw_bf16_by_step': [round(item.wire_bytes / item.raw_bytes, 3) for item in transfers],
        'changed_weights_by_step': [round(item.changed_share, 3) for item in transfers],
        'is_lossless': all(item.is_lossless for item in transfers),
        'encode_mb_per_second': round(raw / 1e6 / sum(item.encode_seconds for item in transfers), 1),
        'decode_mb_per_second': round(raw / 1e6 / sum(item.decode_seconds for item in transfers), 1),
    }


def _send(new: PackedState, base: PackedState) -> Transfer:
    begin = time.perf_counter()
    delta = encode_delta(new.manifest, new.data, base.data)
    encoded = time.perf_counter()
    target = bytearray(new.manifest.size_bytes)
    apply_delta(new.manifest, base.data, delta, target)
    decoded = time.perf_counter()
    words = [np.frombuffer(state.data, '<u2') for state in (new, base)]
    return Transfer(
        raw_bytes=new.manifest.size_bytes,
        wire_bytes=min(len(delta), new.manifest.size_bytes),
        encode_seconds=encoded - begin,
        decode_seconds=decoded - encoded,
        changed_share=float((words[0] != words[1]).mean()),
        is_lossless=target == new.data,
    )


def _version(model: TransformersModel) -> PackedState:
    """Return the adapter as published in bf16."""
    state = model.export_weights()
    rounded = round_tensors(unpack_state(state.manifest, state.data), 'bfloat16')
    return pack_state(rounded.tensors, base_model=MODEL, lora_config=state.manifest.lora_config)


def _trainer() -> tuple[TransformersModel, DataLoader]:
    dataset = Dataset(DatasetMeta(str(DATA)))
    dataset.set_template('Template', model_id=MODEL, max_length=256)
    dataset.map(SelfCognitionProcessor('Twinkle', 'the Twinkle team'))
    dataset.encode()
    model = TransformersModel(MODEL, device='cpu')
    model.add_adapter_to_model('default', LoraConfig(r=LORA_RANK, lora_alpha=2 * LORA_RANK, seed=1))
    model.set_optimizer('AdamW', lr=LEARNING_RATE)
    return model, DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True, seed=0)


if __name__ == '__main__':
    print(json.dumps(main(), indent=2))
