"""The baseline without Twinkle: transformers and peft with one adapter and one batch at a time."""

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from benchmarks.random_model import SIZES, build_random_model
from twinkle.hub import resolve_model


class BarePeft:
    """A base model with one LoRA adapter on every linear layer except the output head.

    The options select the model, its device and dtype, and the LoRA rank.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        if options.model in SIZES:
            base = build_random_model(options.model, device=options.device, dtype=options.dtype, attention='sdpa')
        else:
            dtype = getattr(torch, options.dtype)
            base = AutoModelForCausalLM.from_pretrained(resolve_model(options.model), dtype=dtype)
        config = LoraConfig(r=options.lora_rank, lora_alpha=16, target_modules='all-linear', task_type='CAUSAL_LM')
        self._device = options.device
        self.model: Any = get_peft_model(base.to(options.device), config).train()

    def train(self, features: Sequence[Any]) -> None:
        """Run forward and backward on examples of equal length with shifted labels, and discard the gradient."""
        self.backward(features)
        self.model.zero_grad()

    def backward(self, features: Sequence[Any]) -> None:
        """Add the gradient of examples of equal length. Their labels are shifted and may be masked."""
        ids, labels = (
            torch.as_tensor(np.stack([feature[name] for feature in features]), device=self._device, dtype=torch.int64)
            for name in ('input_ids', 'labels')
        )
        logits = self.model(input_ids=ids).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()).backward()
