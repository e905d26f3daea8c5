"""Seeded plans for the clients of a fault run: adapters and the operations on them.

A plan is complete before the run starts, so that the runs with and without faults execute the same operations.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from google.protobuf.struct_pb2 import Struct

from twinkle.api.data.v1 import input_feature_pb2
from twinkle.api.model.v1 import adapter_service_pb2, operation_pb2, training_config_pb2
from twinkle.data_format import IGNORE_INDEX
from twinkle_services.kit.rpc.tensors import tensor_to_proto

TENANTS = ('alice', 'bob')
"""Names of the tenants. The adapters of a seed belong to the tenants in turn."""
FINAL_SAVE = 'final'
"""Name of the checkpoint that the last operation of each plan saves."""
_MIN_OPERATIONS = 15
"""Minimum number of operations of an adapter before the final save."""
_MAX_EXAMPLE_TOKENS = 40
"""Maximum length of an example in a batch that is not large."""
_TOKEN_IDS = 300
"""Upper bound of the token ids, exclusive."""
_LARGE_BATCH_PROBABILITY = 0.1
"""Probability that a batch has the lengths of `_LARGE_BATCH`."""
_LARGE_BATCH = [120] * 13
"""Lengths of a batch that is so large that the journal stores it in a separate file instead of its database."""


@dataclass(frozen=True)
class PlannedVerb:
    """One operation: the name of the verb in the contract, and its message."""

    name: str
    message: Any
    loaded_checkpoint: str = ''
    """Name of the checkpoint that a `load` operation reads. Its path is known only after it is saved."""


@dataclass(frozen=True)
class Segment:
    """Operations that are sent together."""

    verbs: Sequence[PlannedVerb]
    is_streamed: bool = False
    """Whether the operations are sent on one stream without waiting for results. If not, each operation waits for the
    result of the previous one."""


@dataclass(frozen=True)
class AdapterPlan:
    """An adapter, its tenant and its operations."""

    tenant: str
    creation: adapter_service_pb2.CreateAdapterRequest
    segments: Sequence[Segment]

    @property
    def operation_count(self) -> int:
        """Number of operations in all segments."""
        return sum(len(segment.verbs) for segment in self.segments)


def plan_adapters(seed: int, base_model: str) -> list[AdapterPlan]:
    """Return the plans of two or three adapters of two tenants; the seed determines all random choices."""
    rng = random.Random(seed)
    return [_plan_adapter(rng, f'seed-{seed}-{index}', index, base_model) for index in range(rng.choice((2, 2, 3)))]


def _plan_adapter(rng: random.Random, name: str, index: int, base_model: str) -> AdapterPlan:
    planner = _Planner(rng)
    while planner.count < _MIN_OPERATIONS:
        rng.choices(planner.steps, weights=planner.weights)[0]()
    planner.save(FINAL_SAVE, is_optimizer_included=True)
    creation = adapter_service_pb2.CreateAdapterRequest(
        request_id=name,
        base_model=base_model,
        lora_config=_lora_config(rng),
        training_config=_training_config(rng),
        user_metadata={'plan': name},
    )
    return AdapterPlan(TENANTS[index % len(TENANTS)], creation, planner.segments)


def _lora_config(rng: random.Random) -> training_config_pb2.LoraConfig:
    targets = rng.choice((['all-linear'], ['q_proj', 'v_proj'], ['gate_proj', 'up_proj', 'down_proj']))
    return training_config_pb2.LoraConfig(
        lora_rank=rng.choice((1, 2, 4)),
        lora_alpha=rng.choice((4.0, 8.0)),
        lora_dropout=rng.choice((0.0, 0.1, 0.3)),
        target_modules=targets,
        is_rank_stabilized=rng.random() < 0.3,
        seed=rng.randrange(2**31),
    )


def _training_config(rng: random.Random) -> training_config_pb2.TrainingConfig:
    reduction = rng.choice((training_config_pb2.LOSS_REDUCTION_SUM, training_config_pb2.LOSS_REDUCTION_MEAN))
    return training_config_pb2.TrainingConfig(
        optimizer=_optimizer(rng),
        loss=training_config_pb2.LossConfig(name='CrossEntropyLoss', reduction=reduction),
        lr_scheduler=training_config_pb2.SchedulerConfig(
            name='CosineWarmupScheduler', options=_struct(num_warmup_steps=2, num_training_steps=20)
        ),
        gradient_accumulation_steps=rng.choice((1, 1, 2)),
        metrics=[training_config_pb2.ComponentConfig(name='LossMetric')] if rng.random() < 0.5 else [],
    )


def _optimizer(rng: random.Random) -> training_config_pb2.OptimizerConfig:
    name, options = rng.choice(
        (('AdamW', {'weight_decay': 0.1}), ('AdamW', {}), ('SGD', {'momentum': 0.9}), ('Adam', {'amsgrad': True}))
    )
    return training_config_pb2.OptimizerConfig(
        name=name, learning_rate=rng.choice((1e-3, 5e-3)), options=_struct(**options)
    )


def _struct(**values: Any) -> Struct:
    struct = Struct()
    struct.update(values)
    return struct


@dataclass
class _Planner:
    """Appends random segments to the plan of one adapter."""

    rng: random.Random
    segments: list[Segment] = field(default_factory=list[Segment])
    count: int = 0
    _trained_segments: int = 0
    _saves: list[tuple[str, bool]] = field(default_factory=list[tuple[str, bool]])

    @property
    def steps(self) -> list[Callable[[], None]]:
        """Methods that append a segment."""
        return [
            self.train,
            self.train_by_parts,
            self.forward_then_backward,
            self.custom_loss,
            self.evaluate,
            self.read_metrics,
            self.configure,
            self.save_checkpoint,
            self.load_checkpoint,
            self.publish,
            self.undo,
            self.fail,
        ]

    @property
    def weights(self) -> tuple[int, ...]:
        """Relative frequencies of the methods."""
        return (10, 4, 3, 2, 1, 2, 2, 2, 1, 2, 2, 1)

    def train(self) -> None:
        """Train several batches with a step after each, sometimes on a stream."""
        verbs: list[PlannedVerb] = []
        for _ in range(self.rng.randint(1, 3)):
            verbs += [self._forward_backward(), self._clip_grad_and_step()]
        self._add(*verbs, is_streamed=self.rng.random() < 0.4)
        self._trained_segments += 1

    def train_by_parts(self) -> None:
        """Accumulate gradients, and run the parts of a step as separate operations."""
        batches = [self._forward_backward() for _ in range(self.rng.randint(1, 3))]
        clip = PlannedVerb('clip_grad_norm', operation_pb2.ClipGradNorm(max_grad_norm=0.5))
        step = PlannedVerb('step', operation_pb2.Step())
        rest = [PlannedVerb('zero_grad', operation_pb2.ZeroGrad()), PlannedVerb('lr_step', operation_pb2.LrStep())]
        self._add(*batches, clip, step, *rest, is_streamed=self.rng.random() < 0.3)
        self._trained_segments += 1

    def forward_then_backward(self) -> None:
        """Run forward, loss and backward as three operations, so that a kill can occur between them."""
        self._add(
            PlannedVerb('forward', operation_pb2.Forward(batch=_batch_of(self._examples()))),
            PlannedVerb('calculate_loss', operation_pb2.CalculateLoss()),
            PlannedVerb('backward', operation_pb2.Backward()),
            self._clip_grad_and_step(),
        )

    def custom_loss(self) -> None:
        """Send the gradient of a loss that the client computes."""
        examples = self._examples()
        noise = np.random.default_rng(self.rng.randrange(2**31))
        gradients = [tensor_to_proto(noise.standard_normal(len(example)).astype(np.float32)) for example in examples]
        self._add(
            PlannedVerb('forward', operation_pb2.Forward(batch=_batch_of(examples))),
            PlannedVerb('backward', operation_pb2.Backward(logprob_gradients=gradients)),
            self._clip_grad_and_step(),
        )

    def evaluate(self) -> None:
        """Run a forward pass without gradients."""
        self._add(PlannedVerb('forward_only', operation_pb2.ForwardOnly(batch=_batch_of(self._examples()))))

    def read_metrics(self) -> None:
        """Read the metrics, which resets them."""
        is_training = self.rng.random() < 0.7
        self._add(PlannedVerb('calculate_metric', operation_pb2.CalculateMetric(is_training=is_training)))

    def configure(self) -> None:
        """Change the optimizer or the number of accumulated batches."""
        if self.rng.random() < 0.5:
            change = training_config_pb2.TrainingConfig(optimizer=_optimizer(self.rng))
        else:
            change = training_config_pb2.TrainingConfig(gradient_accumulation_steps=self.rng.choice((1, 2)))
        self._add(PlannedVerb('configure', operation_pb2.Configure(training_config=change)))

    def save_checkpoint(self) -> None:
        """Save a checkpoint, sometimes in place of an earlier one."""
        is_repeated = bool(self._saves) and self.rng.random() < 0.3
        name = self._saves[-1][0] if is_repeated else f'save-{len(self._saves)}'
        self.save(name, is_optimizer_included=self.rng.random() < 0.5)

    def load_checkpoint(self) -> None:
        """Load an earlier checkpoint, if there is one."""
        if not self._saves:
            return
        name, is_optimizer_included = self.rng.choice(self._saves)
        message = operation_pb2.Load(is_optimizer_included=is_optimizer_included)
        self._add(PlannedVerb('load', message, loaded_checkpoint=name))

    def publish(self) -> None:
        """Publish a pinned version."""
        self._add(PlannedVerb('publish_version', operation_pb2.PublishVersion(is_pinned=True)))

    def undo(self) -> None:
        """Undo one or two steps; if there are too few steps, the operation fails in the same way in every run."""
        if self._trained_segments:
            self._add(
                PlannedVerb('undo', operation_pb2.Undo(step_count=self.rng.randint(1, min(2, self._trained_segments))))
            )

    def fail(self) -> None:
        """Run an operation that is accepted and fails, and therefore consumes its sequence number."""
        self._add(PlannedVerb('zero_grad', operation_pb2.ZeroGrad()), PlannedVerb('backward', operation_pb2.Backward()))

    def save(self, name: str, *, is_optimizer_included: bool) -> None:
        """Save a checkpoint named `name`."""
        message = operation_pb2.Save(
            name=name,
            is_optimizer_included=is_optimizer_included,
            is_overwrite_allowed=any(n == name for n, _ in self._saves),
        )
        self._saves = [(n, o) for n, o in self._saves if n != name] + [(name, is_optimizer_included)]
        self._add(PlannedVerb('save', message))

    def _add(self, *verbs: PlannedVerb, is_streamed: bool = False) -> None:
        self.segments.append(Segment(verbs, is_streamed))
        self.count += len(verbs)

    def _forward_backward(self) -> PlannedVerb:
        return PlannedVerb('forward_backward', operation_pb2.ForwardBackward(batch=_batch_of(self._examples())))

    def _clip_grad_and_step(self) -> PlannedVerb:
        return PlannedVerb(
            'clip_grad_and_step', operation_pb2.ClipGradAndStep(max_grad_norm=self.rng.choice((0.1, 1.0)))
        )

    def _examples(self) -> list[np.ndarray]:
        noise = np.random.default_rng(self.rng.randrange(2**31))
        lengths = [self.rng.randint(4, _MAX_EXAMPLE_TOKENS) for _ in range(self.rng.randint(1, 3))]
        if self.rng.random() < _LARGE_BATCH_PROBABILITY:
            lengths = _LARGE_BATCH
        return [noise.integers(3, _TOKEN_IDS, length) for length in lengths]


def _batch_of(examples: Sequence[np.ndarray]) -> operation_pb2.Batch:
    """Return a batch of examples; the first third of each example is a prompt without labels."""
    return operation_pb2.Batch(features=input_feature_pb2.FeatureBatch(features=map(_feature, examples)))


def _feature(ids: np.ndarray) -> input_feature_pb2.InputFeature:
    labels = np.append(ids[1:], IGNORE_INDEX)
    labels[: len(ids) // 3] = IGNORE_INDEX
    return input_feature_pb2.InputFeature(
        input_ids=tensor_to_proto(ids.astype(np.int32)),
        labels=tensor_to_proto(labels.astype(np.int32)),
        loss_weights=tensor_to_proto((ids % 3).astype(np.float32)),
    )
