"""Trainers whose layers Megatron-core runs. They need the extra `megatron`."""

from typing import Any

from twinkle.component import InvalidComponentOptions
from twinkle.model.multi_lora import MultiLoraTransformersModel
from twinkle.model.transformers_model import TransformersModel
from twinkle.model.verbs import ConfiguringVerbs

DEFAULT = 'default'
"""Name of Megatron's optimizer and of its schedule."""
_SCHEDULERS = {'cosine': 'CosineWarmupScheduler', 'linear': 'LinearWarmupScheduler'}
"""Schedules by Megatron's `lr_decay_style`."""
_SCHEDULE_OPTIONS = ('lr_decay_steps', 'max_lr', 'min_lr', 'lr_warmup_steps', 'lr_decay_style')


class _MegatronNames(ConfiguringVerbs):
    """Megatron's names for optimizers and schedules, in addition to torch's names."""

    def set_optimizer(self, optimizer_cls: Any = DEFAULT, *, adapter_name: str | None = None, **options: Any) -> None:
        """Replace the optimizer; 'default' is AdamW. For arguments and errors see `TransformersModel`."""
        name = 'AdamW' if optimizer_cls == DEFAULT else optimizer_cls
        super().set_optimizer(name, adapter_name=adapter_name, **options)

    def set_lr_scheduler(
        self, scheduler_cls: Any = DEFAULT, *, adapter_name: str | None = None, **options: Any
    ) -> None:
        """Replace the schedule.

        Args:
            scheduler_cls: 'default', or a schedule that `TransformersModel` accepts.
            adapter_name: optional while there is one adapter.
            options: for 'default': `lr_decay_steps`, the number of steps including warm-up; `lr_warmup_steps`, the
                number of steps of warm-up, by default 0; `lr_decay_style`, 'cosine' (the default) or 'linear';
                `max_lr`, which must equal the learning rate of the optimizer; and `min_lr`, which must be 0.

        Raises:
            InvalidComponentOptions: an option is unknown, missing or out of range.
            UnknownComponent: the name is unknown.
        """
        if scheduler_cls == DEFAULT:
            group = self.engine.adapter(self._adapter(adapter_name)).optimizer.param_groups[0]
            # An earlier schedule may have changed the learning rate.
            learning_rate = float(group.get('initial_lr', group['lr']))
            scheduler_cls, options = default_schedule(learning_rate, **options)
        super().set_lr_scheduler(scheduler_cls, adapter_name=adapter_name, **options)


class MegatronModel(_MegatronNames, TransformersModel):
    """`TransformersModel` whose layers Megatron-core runs, for Llama, Mistral, Qwen 2, Qwen 3 and Qwen3-MoE.

    `tp` ranks divide each layer and the experts of a mixture, and with `sequence_parallel` of the mesh also the
    activations between layers. Each `pp` rank runs consecutive layers. `dp` ranks share the passes of a batch. Each
    rank reads only its part of the weights. Every rank has complete adapters with peft's names, and they can be
    exchanged with any other trainer. Full-parameter training and patches are not supported.

    On CPUs, results are bitwise the same for every number of `dp` and `pp` ranks; see `TransformersModel`. Results for
    different numbers of `tp` ranks differ by rounding.
    """

    _is_megatron = True
    _supports_full_training = False


class MultiLoraMegatronModel(_MegatronNames, MultiLoraTransformersModel):
    """`MegatronModel` with limits on adapters and on the length of examples; see `MultiLoraTransformersModel`."""

    _is_megatron = True


def default_schedule(learning_rate: float, **options: Any) -> tuple[str, dict[str, Any]]:
    """Return the name and the options of the schedule that Megatron's options describe.

    Args:
        learning_rate: learning rate of the optimizer.
        options: see `MegatronModel.set_lr_scheduler`.

    Raises:
        InvalidComponentOptions: an option is unknown, `lr_decay_steps` is missing, or the value of another option is
            not supported.
    """
    unknown = sorted(set(options) - set(_SCHEDULE_OPTIONS))
    style = options.get('lr_decay_style', 'cosine')
    max_lr, min_lr = options.get('max_lr', learning_rate), options.get('min_lr', 0.0)
    problem = None
    if unknown:
        problem = f'unknown options {unknown}; known are {list(_SCHEDULE_OPTIONS)}'
    elif 'lr_decay_steps' not in options:
        problem = 'lr_decay_steps is missing'
    elif style not in _SCHEDULERS:
        problem = f'lr_decay_style must be one of {sorted(_SCHEDULERS)}, got {style!r}'
    elif max_lr != learning_rate:
        problem = f'max_lr must be the learning rate of the optimizer, {learning_rate}, got {max_lr}; leave it out'
    elif min_lr:
        problem = f'min_lr must be 0, got {min_lr}'
    if problem is not None:
        raise InvalidComponentOptions('lr_scheduler', DEFAULT, problem)
    steps = {'num_warmup_steps': options.get('lr_warmup_steps', 0), 'num_training_steps': options['lr_decay_steps']}
    return _SCHEDULERS[style], steps
