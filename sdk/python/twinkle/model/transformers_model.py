"""The trainer of one process and one device."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from twinkle.data_format import InputFeature, LoraConfig, ModelOutput
from twinkle.hub import resolve_model
from twinkle.infra import DeviceMesh, NotSupportedYet, refuse_many_ranks, runtime
from twinkle.model.base import Inputs, TwinkleModel
from twinkle.model.checkpoint_folder import read_checkpoint, write_checkpoint
from twinkle.model.engine import ForwardOptions, ForwardResult, TrainerEngine
from twinkle.model.engine.snapshot import trainer_state
from twinkle.model.errors import AdapterNotReady, InvalidArgument
from twinkle.nn import PackedCausalLM
from twinkle.template import Template, build_template

_DTYPES = {'no': 'float32', 'bf16': 'bfloat16'}
SAVE_DIR_VARIABLE = 'TWINKLE_DEFAULT_SAVE_DIR'
"""Environment variable: where checkpoints go unless `output_dir` says otherwise; unset: ./output."""


class TransformersModel(TwinkleModel):
    """Any causal language model of transformers, with adapters in training on one device.

    Args:
        model_id: a hub id or a folder.
        device_mesh: of one device; unset means the same.
        mixed_precision: 'no' holds the frozen weights in float32, 'bf16' in bfloat16; adapters are float32.
        device: 'cpu', 'cuda' and so on; unset: 'cuda' where there is one.
        unsupported: what other releases take; refused by name.

    Raises:
        NotSupportedYet: several devices, or an option of `unsupported`.
        ModelNotFound: the id resolves to nothing.
    """

    def __init__(
        self,
        model_id: str,
        *,
        device_mesh: DeviceMesh | None = None,
        mixed_precision: str = 'no',
        device: str | None = None,
        **unsupported: Any,
    ) -> None:
        if unsupported:
            raise NotSupportedYet(f'{sorted(unsupported)} are not supported yet; leave them out')
        if mixed_precision not in _DTYPES:
            raise InvalidArgument(f'mixed_precision must be one of {sorted(_DTYPES)}, got {mixed_precision!r}')
        refuse_many_ranks(device_mesh or runtime().device_mesh)
        self.model_id = model_id
        device = device or ('cuda' if torch.cuda.is_available() else 'cpu')
        folder = resolve_model(model_id)
        self.engine = TrainerEngine(PackedCausalLM.load(folder, dtype=_DTYPES[mixed_precision], device=device))
        self._templates: dict[str, Template] = {}

    def add_adapter_to_model(
        self, adapter_name: str, config_or_dir: Any, *, gradient_accumulation_steps: int = 1
    ) -> None:
        """Add an adapter.

        Args:
            adapter_name: not yet in use.
            config_or_dir: a `LoraConfig` of ours or of peft, or a peft folder to begin from.
            gradient_accumulation_steps: batches that make a step, at least 1.

        Raises:
            AdapterExists: the name is in use.
            UnknownTargetModules: the configuration names layers the model does not have.
            SnapshotMismatch: the folder is no adapter of this model.
        """
        is_folder = isinstance(config_or_dir, str | os.PathLike)
        snapshot = read_checkpoint(Path(config_or_dir)) if is_folder else None
        config = snapshot.lora_config if snapshot is not None else LoraConfig.of(config_or_dir)
        self.engine.create_adapter(adapter_name, config, gradient_accumulation_steps=gradient_accumulation_steps)
        if snapshot is None:
            return
        try:
            self.engine.import_state(adapter_name, snapshot, is_optimizer_included=False)
        except ValueError:
            self.engine.delete_adapter(adapter_name)
            raise

    def set_optimizer(self, optimizer_cls: Any = 'AdamW', *, adapter_name: str | None = None, **options: Any) -> None:
        """Replace the optimizer.

        Args:
            optimizer_cls: a name in torch.optim, or a class.
            adapter_name: may be left out while there is one adapter.
            options: of its constructor, such as `lr`.

        Raises:
            UnknownComponent: the name is not known.
            InvalidComponentOptions: an option is unknown or out of range.
        """
        self.engine.set_optimizer(self._adapter(adapter_name), optimizer_cls, **options)

    def set_lr_scheduler(self, scheduler_cls: Any, *, adapter_name: str | None = None, **options: Any) -> None:
        """Replace the schedule, given by name or class; arguments and errors as `set_optimizer`."""
        self.engine.set_lr_scheduler(self._adapter(adapter_name), scheduler_cls, **options)

    def set_loss(self, loss_cls: Any, *, adapter_name: str | None = None, **options: Any) -> None:
        """Replace the loss, given by name, class, instance or function; errors as `set_optimizer`."""
        self.engine.set_loss(self._adapter(adapter_name), loss_cls, **options)

    def set_processor(self, processor_cls: Any, *, adapter_name: str | None = None, **options: Any) -> None:
        """Replace the input processor, given by name, class or instance; errors as `set_optimizer`."""
        self.engine.set_processor(self._adapter(adapter_name), processor_cls, **options)

    def set_template(self, template_cls: Any, *, adapter_name: str | None = None, **options: Any) -> None:
        """Set what encodes inputs that are chats.

        Raises:
            UnknownTemplate: the name is not known.
        """
        name = self._adapter(adapter_name)
        if not isinstance(template_cls, Template):
            options.setdefault('model_id', self.model_id)
        self._templates[name] = build_template(template_cls, **options)

    def add_metric(
        self, metric_cls: Any, *, is_training: bool = True, adapter_name: str | None = None, **options: Any
    ) -> None:
        """Report one more metric; errors as `set_optimizer`."""
        self.engine.add_metric(self._adapter(adapter_name), metric_cls, is_training=is_training, **options)

    def apply_patch(self, patch: Any, **options: Any) -> None:
        """Refuse: patches are not supported yet.

        Raises:
            NotSupportedYet: always.
        """
        raise NotSupportedYet(f'patches are not supported yet, got {patch!r} with {sorted(options)}')

    def forward_only(
        self,
        inputs: Inputs,
        *,
        adapter_name: str | None = None,
        temperature: float = 1.0,
        disable_lora: bool = False,
    ) -> ModelOutput:
        """Return loss and log-probabilities; changes nothing but the evaluation metrics.

        Args:
            inputs: one example or several.
            adapter_name: may be left out while there is one adapter.
            temperature: divides the logits; positive.
            disable_lora: run the base model without the adapter.

        Raises:
            InvalidFeatures: names the feature, the field and the cure.
        """
        name = self._adapter(adapter_name)
        options = ForwardOptions(temperature=temperature, is_adapter_disabled=disable_lora)
        return _model_output(self.engine.forward_only(name, self._features(name, inputs), options=options))

    def forward(self, inputs: Inputs, *, adapter_name: str | None = None, temperature: float = 1.0) -> ModelOutput:
        """Return log-probabilities and keep what `calculate_loss` and `backward` need; errors as `forward_only`."""
        name = self._adapter(adapter_name)
        options = ForwardOptions(temperature=temperature)
        return _model_output(
            self.engine.forward(name, self._features(name, inputs), options=options), is_loss_known=False
        )

    def calculate_loss(self, *, adapter_name: str | None = None) -> float:
        """Return the loss of the last `forward`.

        Raises:
            AdapterNotReady: there is none.
            LossNotFinite: the model gave no finite loss.
        """
        return self.engine.calculate_loss(self._adapter(adapter_name)).loss

    def backward(self, *, adapter_name: str | None = None) -> None:
        """Add the gradient of the last `calculate_loss`; errors as it."""
        self.engine.backward(self._adapter(adapter_name))

    def forward_backward(
        self, inputs: Inputs, *, adapter_name: str | None = None, temperature: float = 1.0
    ) -> ModelOutput:
        """Return loss and log-probabilities, and add the gradient to the accumulated one.

        Raises:
            InvalidFeatures: names the feature, the field and the cure.
            LossNotFinite: no gradient was added.
        """
        name = self._adapter(adapter_name)
        options = ForwardOptions(temperature=temperature)
        return _model_output(self.engine.forward_backward(name, self._features(name, inputs), options=options))

    def clip_grad_norm(
        self, max_grad_norm: float = 1.0, norm_type: float = 2.0, *, adapter_name: str | None = None
    ) -> float | None:
        """Limit the gradient's norm; return the norm before, None while accumulating.

        Raises:
            AdapterNotReady: there is no gradient.
        """
        name = self._adapter(adapter_name)
        return self.engine.clip_grad_norm(name, max_grad_norm=max_grad_norm, norm_type=norm_type)

    def step(self, *, adapter_name: str | None = None) -> None:
        """Apply the accumulated gradient, once enough batches are in it.

        Raises:
            AdapterNotReady: there is no gradient.
        """
        self.engine.step(self._adapter(adapter_name))

    def zero_grad(self, *, adapter_name: str | None = None) -> None:
        """Drop the accumulated gradient, once a step is due."""
        self.engine.zero_grad(self._adapter(adapter_name))

    def lr_step(self, *, adapter_name: str | None = None) -> None:
        """Move the schedule by one step, once a step is due.

        Raises:
            AdapterNotReady: there is no schedule.
        """
        self.engine.lr_step(self._adapter(adapter_name))

    def clip_grad_and_step(
        self, max_grad_norm: float = 1.0, norm_type: float = 2.0, *, adapter_name: str | None = None
    ) -> float | None:
        """Do clip_grad_norm, step, zero_grad and, where there is a schedule, lr_step; errors as they.

        Returns:
            The norm before clipping; None while accumulating.
        """
        name = self._adapter(adapter_name)
        return self.engine.clip_grad_and_step(name, max_grad_norm=max_grad_norm, norm_type=norm_type).grad_norm

    def calculate_metric(self, is_training: bool = True, *, adapter_name: str | None = None) -> dict[str, float]:  # noqa: FBT001, FBT002 - an established name and place
        """Return what was gathered since the last call, as numbers."""
        return self.engine.calculate_metric(self._adapter(adapter_name), is_training=is_training)

    def save(
        self,
        name: str,
        output_dir: str | None = None,
        *,
        adapter_name: str | None = None,
        save_optimizer: bool = False,
        consumed_train_samples: int = 0,
    ) -> str:
        """Save a checkpoint as a peft folder, replacing one of the same name.

        Args:
            name: of the folder.
            output_dir: where it goes. Unset: `TWINKLE_DEFAULT_SAVE_DIR`, else ./output.
            adapter_name: may be left out while there is one adapter.
            save_optimizer: keep what it takes to resume, too.
            consumed_train_samples: kept with it, where the optimizer is.

        Returns:
            The folder.
        """
        snapshot = self.engine.export_state(
            self._adapter(adapter_name),
            is_optimizer_included=save_optimizer,
            consumed_train_samples=consumed_train_samples,
        )
        folder = _checkpoint_folder(name, output_dir)
        write_checkpoint(folder, snapshot, base_model=self.model_id)
        return str(folder)

    def load(
        self,
        name: str,
        output_dir: str | None = None,
        *,
        adapter_name: str | None = None,
        load_optimizer: bool = False,
    ) -> None:
        """Replace the adapter's weights by a checkpoint's.

        Args:
            name: of the folder.
            output_dir: where it is, as in `save`.
            adapter_name: may be left out while there is one adapter.
            load_optimizer: go on with optimizer, schedule, counters and random state too.

        Raises:
            SnapshotMismatch: it does not fit the adapter; nothing was changed.
        """
        snapshot = read_checkpoint(_checkpoint_folder(name, output_dir))
        self.engine.import_state(self._adapter(adapter_name), snapshot, is_optimizer_included=load_optimizer)

    def resume_from_checkpoint(
        self, checkpoint_dir: str, *, resume_only_model: bool = False, adapter_name: str | None = None
    ) -> Mapping[str, int]:
        """Go on from a checkpoint saved with its optimizer.

        Args:
            checkpoint_dir: the folder.
            resume_only_model: load the weights alone and return no counters.
            adapter_name: may be left out while there is one adapter.

        Returns:
            `cur_step`, `gradient_accumulation_steps` and `consumed_train_samples` as saved.

        Raises:
            SnapshotMismatch: it does not fit the adapter, or was saved without its optimizer.
        """
        snapshot = read_checkpoint(Path(checkpoint_dir))
        name = self._adapter(adapter_name)
        self.engine.import_state(name, snapshot, is_optimizer_included=not resume_only_model)
        if resume_only_model:
            return {}
        numbers = trainer_state(snapshot)
        return {
            'cur_step': numbers['step_count'],
            'gradient_accumulation_steps': numbers['gradient_accumulation_steps'],
            'consumed_train_samples': numbers['extra'].get('consumed_train_samples', 0),
        }

    def upload_to_hub(self, checkpoint_dir: str, hub_model_id: str, **options: Any) -> None:
        """Refuse: uploads are not supported yet.

        Raises:
            NotSupportedYet: always.
        """
        raise NotSupportedYet(f'cannot upload {checkpoint_dir} to {hub_model_id} yet; {sorted(options)} were not used')

    def get_state_dict(self, *, adapter_name: str | None = None) -> dict[str, torch.Tensor]:
        """Return copies of the adapter's weights under peft's names."""
        state = self.engine.adapter(self._adapter(adapter_name)).weights.peft_state()
        return {name: tensor.clone() for name, tensor in state.items()}

    def get_train_configs(self, *, adapter_name: str | None = None) -> str:
        """Describe how the adapter is trained, for people."""
        name = self._adapter(adapter_name)
        state = self.engine.adapter(name)
        config = state.config
        choices = {
            'optimizer': state.optimizer_choice,
            'lr_scheduler': state.scheduler_choice,
            'loss': state.loss_choice,
        }
        lines = [
            f'model: {self.model_id} on {self.engine.model.device}',
            f'adapter: {name}, {state.weights.parameter_count:,} trainable parameters',
            f'lora: r={config.r}, alpha={config.lora_alpha}, dropout={config.lora_dropout}, seed={config.seed}',
            f'target_modules: {config.target_modules}',
            f'gradient_accumulation_steps: {state.gradient_accumulation_steps}',
        ]
        for kind, choice in choices.items():
            described = 'none' if choice is None else f'{choice.name} {dict(choice.options)}'
            lines.append(f'{kind}: {described}')
        return '\n'.join(lines)

    def _adapter(self, adapter_name: str | None) -> str:
        if adapter_name is not None:
            self.engine.adapter(adapter_name)
            return adapter_name
        names = self.engine.adapter_ids
        if not names:
            raise NotSupportedYet('full-parameter training is not supported yet; call add_adapter_to_model first')
        if len(names) > 1:
            raise InvalidArgument(f'there are the adapters {list(names)}; say which with adapter_name=')
        return names[0]

    def _features(self, name: str, inputs: Inputs) -> Sequence[InputFeature]:
        examples: Sequence[Any] = [inputs] if isinstance(inputs, Mapping) else list(inputs)
        if not any('messages' in example and 'input_ids' not in example for example in examples):
            return examples
        if name not in self._templates:
            raise AdapterNotReady(name, 'a template to encode chats: call set_template first')
        return self._templates[name].batch_encode(examples)


def _checkpoint_folder(name: str, output_dir: str | None) -> Path:
    if not name or Path(name).name != name:
        raise InvalidArgument(f'name must be the name of a folder, without separators, got {name!r}')
    return Path(output_dir or os.environ.get(SAVE_DIR_VARIABLE) or 'output') / name


def _model_output(result: ForwardResult, *, is_loss_known: bool = True) -> ModelOutput:
    output = ModelOutput(logps=list(result.logps), num_tokens=result.num_tokens)
    if is_loss_known:
        output['loss'] = result.loss
    return output
