"""Methods that configure what is trained and how."""

import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from twinkle.data_format import LoraConfig
from twinkle.infra import get_logger
from twinkle.model.checkpoint_folder import read_checkpoint
from twinkle.model.errors import InvalidArgument
from twinkle.model.verbs.handle import WHOLE_MODEL, ModelHandle
from twinkle.patch import Patch, PatchError, apply_patch
from twinkle.template import Template, build_template


class ConfiguringVerbs(ModelHandle):
    """Configuration methods. A refused call changes nothing.

    `adapter_name` is optional while there is one adapter; for its errors see `chosen_adapter`.
    """

    def add_adapter_to_model(
        self,
        adapter_name: str,
        config_or_dir: Any = None,
        *,
        full_parameters: bool = False,
        gradient_accumulation_steps: int = 1,
    ) -> None:
        """Add an adapter.

        Args:
            adapter_name: a new name.
            config_or_dir: `LoraConfig` of this library or of peft, or a peft folder of any origin with initial weights.
                None uses a `LoraConfig` with default values.
            full_parameters: whether to train all of the base model's weights instead of an adapter. The model is then
                leased to this run until `remove_adapter` restores the weights.
            gradient_accumulation_steps: number of batches per optimizer step, at least 1.

        Raises:
            AdapterExists: the name is in use.
            TypeError, ValueError: `config_or_dir` is not a supported configuration; see `LoraConfig.of`.
            InvalidArgument: `gradient_accumulation_steps` is below 1, the configuration exceeds a limit of the trainer,
                or it is given with `full_parameters`.
            ModelLeased: a full-parameter run has leased the model, or cannot lease it because of other adapters.
            UnknownTargetModules: the configuration names layers that the model does not have.
            ExpertDropout: the configuration has dropout and targets experts.
            UnsupportedModel: the model does not support `full_parameters`, for example because it is not in float32.
            SnapshotMismatch: the folder is not an adapter of this model.
        """
        if full_parameters:
            if config_or_dir is not None:
                raise InvalidArgument('config_or_dir must be left out with full_parameters: there is no adapter')
            self.engine.create_full_adapter(adapter_name, gradient_accumulation_steps=gradient_accumulation_steps)
            return
        is_folder = isinstance(config_or_dir, str | os.PathLike)
        snapshot = read_checkpoint(Path(config_or_dir)) if is_folder else None
        config = snapshot.lora_config if snapshot is not None else LoraConfig.of(config_or_dir or {})
        self._check_config(config)
        if config.seed is None:
            # The random generators of the processes may differ, but all processes must use the same seed.
            seed = self._shares.on_first(f'added {adapter_name}', lambda: int(torch.randint(2**31, ())))
            config = replace(config, seed=seed)
        self.engine.create_adapter(adapter_name, config, gradient_accumulation_steps=gradient_accumulation_steps)
        if snapshot is None:
            return
        try:
            self.engine.import_state(adapter_name, snapshot, is_optimizer_included=False)
        except ValueError:
            self.engine.delete_adapter(adapter_name)
            raise

    def remove_adapter(self, adapter_name: str) -> None:
        """Delete an adapter.

        Raises:
            UnknownAdapter: the adapter does not exist.
        """
        self.engine.delete_adapter(adapter_name)
        self._templates.pop(adapter_name, None)

    def set_optimizer(self, optimizer_cls: Any = 'AdamW', *, adapter_name: str | None = None, **options: Any) -> None:
        """Replace the optimizer.

        If there is no adapter and no name is given, `TransformersModel` starts full-parameter training in a run with
        the name 'default', like `add_adapter_to_model` with `full_parameters=True`. `MegatronModel` and
        `MultiLoraTransformersModel` raise `NotSupportedYet`.

        Args:
            optimizer_cls: name that `twinkle.module.build_optimizer` accepts, or a class.
            adapter_name: optional while there is one adapter.
            options: arguments of its constructor, such as `lr`, and parameter `groups` with other options.

        Raises:
            UnknownComponent: the name is unknown.
            InvalidComponentOptions: an option is unknown or out of range.
            UnknownAdapter, NotSupportedYet, InvalidArgument: no adapter can be chosen; see `chosen_adapter`.
            UnsupportedModel: the model does not support full-parameter training.
        """
        with ExitStack() as undo:
            if adapter_name is None and not self.engine.adapter_ids and self._supports_full_training:
                get_logger().info('no adapter was added: training the weights of %s', self.model_id)
                self.add_adapter_to_model(WHOLE_MODEL, full_parameters=True)
                undo.callback(self.remove_adapter, WHOLE_MODEL)
            self.engine.set_optimizer(self._adapter(adapter_name), optimizer_cls, **options)
            undo.pop_all()

    def set_lr_scheduler(self, scheduler_cls: Any, *, adapter_name: str | None = None, **options: Any) -> None:
        """Replace the schedule, given by name or class; for arguments and errors see `set_optimizer`."""
        self.engine.set_lr_scheduler(self._adapter(adapter_name), scheduler_cls, **options)

    def set_loss(self, loss_cls: Any, *, adapter_name: str | None = None, **options: Any) -> None:
        """Replace the loss, given by name, plugin id, class, instance or function.

        A loss that needs a value head adds one to the adapter.

        Raises:
            UnknownComponent, InvalidComponentOptions, PluginRefused, HubError: see `twinkle.loss.build_loss`.
            InvalidArgument: the loss needs a value head, and `fsdp` ranks divide the weights of a full-parameter run.
        """
        self.engine.set_loss(self._adapter(adapter_name), loss_cls, **options)

    def set_processor(self, processor_cls: Any, *, adapter_name: str | None = None, **options: Any) -> None:
        """Replace the input processor, given by name, class or instance; for errors see `ComponentRegistry.build`."""
        self.engine.set_processor(self._adapter(adapter_name), processor_cls, **options)

    def set_template(self, template_cls: Any, *, adapter_name: str | None = None, **options: Any) -> None:
        """Set the template that encodes chats, given by name, plugin id, class or instance.

        Raises:
            UnknownTemplate, PluginRefused, TypeError, HubError, TemplateError, ValueError: see
                `twinkle.template.build_template`.
        """
        name = self._adapter(adapter_name)
        if not isinstance(template_cls, Template):
            options.setdefault('model_id', self.model_id)
        self._templates[name] = build_template(template_cls, **options)

    def add_metric(
        self, metric_cls: Any, *, is_training: bool = True, adapter_name: str | None = None, **options: Any
    ) -> None:
        """Add a metric of training or, if `is_training` is false, of forward-only batches.

        Args:
            metric_cls: name, class or instance.
            is_training: whether training batches update the metric.
            adapter_name: optional while there is one adapter.
            options: arguments of its constructor.

        Raises:
            UnknownComponent, InvalidComponentOptions, PluginRefused, HubError: see `ComponentRegistry.build`.
        """
        self.engine.add_metric(self._adapter(adapter_name), metric_cls, is_training=is_training, **options)

    def apply_patch(self, patch: Any, **options: Any) -> Patch:
        """Patch the base model before adapters are added, and return the patch, which `unpatch` undoes.

        A sampler must load the model with the same patch to agree with the trainer.

        Args:
            patch: registered name (see `twinkle.patch`), a class or an instance.
            options: arguments of its constructor.

        Raises:
            UnknownComponent: the name is unknown.
            InvalidComponentOptions: an option is unknown or out of range.
            PatchError: the patch does not support the model, or there are adapters already.
        """
        if self.engine.adapter_ids:
            name = patch if isinstance(patch, str) else getattr(patch, '__name__', type(patch).__name__)
            raise PatchError(
                name, f'adapters already exist ({", ".join(self.engine.adapter_ids)}); patch the model first'
            )
        return apply_patch(self.engine.model.backbone, patch, **options)

    def get_train_configs(self, *, adapter_name: str | None = None) -> str:
        """Return a readable description of the adapter's training configuration."""
        name = self._adapter(adapter_name)
        state = self.engine.adapter(name)
        lines = [
            f'model: {self.model_id} on {self.engine.model.device}',
            f'adapter: {name}, {sum(item.numel() for item in state.parameters()):,} trainable parameters',
            *_weights_lines(state.config),
            f'gradient_accumulation_steps: {state.gradient_accumulation_steps}',
        ]
        choices = {
            'optimizer': state.optimizer_choice,
            'lr_scheduler': state.scheduler_choice,
            'loss': state.loss_choice,
            'processor': state.processor_choice,
        }
        for kind, choice in choices.items():
            described = 'none' if choice is None else f'{choice.name} {dict(choice.options)}'
            lines.append(f'{kind}: {described}')
        return '\n'.join(lines)


def _weights_lines(config: LoraConfig | None) -> list[str]:
    """Return the lines about the trained weights; without a configuration, the run trains the base model's weights."""
    if config is None:
        return ["weights: the base model's own"]
    return [
        f'lora: r={config.r}, alpha={config.lora_alpha}, dropout={config.lora_dropout}, seed={config.seed}',
        f'target_modules: {config.target_modules}',
    ]
