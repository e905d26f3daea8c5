"""Weights on the wire: conversion of frames and manifests to messages, the chunk codec, and the client.

Trainers publish, samplers subscribe and relay, and the checkpoint service stores. All use WeightStreamService through
this package. The values themselves are in `twinkle_services.kit.weights`.
"""

from twinkle_services.kit.weights.wire.client import Synced, WeightClient
from twinkle_services.kit.weights.wire.convert_frames import (
    encoding_from_proto,
    fetch_options_from_proto,
    frame_of,
    frame_to_fetched,
    frame_to_proto,
    frame_to_subscribed,
    receiver_options_from_proto,
    segment_from_proto,
)
from twinkle_services.kit.weights.wire.convert_lora_config import (
    MAX_NAMES,
    lora_config_from_proto,
    lora_config_to_proto,
)
from twinkle_services.kit.weights.wire.convert_manifest import (
    chunk_from_proto,
    chunk_to_proto,
    manifest_from_proto,
    manifest_to_proto,
)
from twinkle_services.kit.weights.wire.handlers import WeightStreamStub, add_weight_stream
from twinkle_services.kit.weights.wire.receiver import ReceivedState

__all__ = [
    'MAX_NAMES',
    'ReceivedState',
    'Synced',
    'WeightClient',
    'WeightStreamStub',
    'add_weight_stream',
    'chunk_from_proto',
    'chunk_to_proto',
    'encoding_from_proto',
    'fetch_options_from_proto',
    'frame_of',
    'frame_to_fetched',
    'frame_to_proto',
    'frame_to_subscribed',
    'lora_config_from_proto',
    'lora_config_to_proto',
    'manifest_from_proto',
    'manifest_to_proto',
    'receiver_options_from_proto',
    'segment_from_proto',
]
