"""Verbs that say what is trained and how."""

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from twinkle.data_format import LoraConfig
from twinkle.infra import get_logger
from twinkle.model.checkpoint_folder import read_checkpoint
from twinkle.model.errors import InvalidArgument
from twinkle.model.verbs.handle import WHOLE_MODEL, ModelHandle
from twinkle.patch import Patch, PatchError, apply_patch
from twinkle.template import Template, build_template


class ConfiguringVerbs(ModelHandle):
    """Each takes `adapter_name`; without it the only adapter is meant. What is refused changed nothing."""

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
            adapter_name: not yet in use.
            config_or_dir: a `LoraConfig` of ours or of peft, or a peft folder to begin from, which any
                tool may have written. Unset: a `LoraConfig` with every default.
            full_parameters: train the base model's own weights, all of them, instead of an adapter's. The model is
                then leased to that run alone, until `remove_adapter` puts the weights back.
            gradient_accumulation_steps: batches that make a step, at least 1.

        Raises:
            AdapterExists: the name is in use.
            InvalidArgument: a configuration is given with `full_parameters`.
            ModelLeased: a run of the base model's own weights has the model, or is to have one that adapters use.
            UnknownTargetModules: the configuration names layers the model does not have.
            SnapshotMismatch: the folder is no adapter of this model.
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
        self.engine.create_adapter(adapter_name, config, gradient_accumulation_steps=gradient_accumulation_steps)
        if snapshot is None:
            return
        try:
            self.engine.import_state(adapter_name, snapshot, is_optimizer_included=False)
        except ValueError:
            self.engine.delete_adapter(adapter_name)
            raise

    def remove_adapter(self, adapter_name: str) -> None:
        """Forget an adapter.

        Raises:
            UnknownAdapter: there is none of that name.
        """
        self.engine.delete_adapter(adapter_name)
        self._templates.pop(adapter_name, None)

    def set_optimizer(self, optimizer_cls: Any = 'AdamW', *, adapter_name: str | None = None, **options: Any) -> None:
        """Replace the optimizer.

        Where no adapter was added, this begins to train the model itself, as `add_adapter_to_model` does with
        `full_parameters=True`; the run is called 'default'.

        Args:
            optimizer_cls: a name that `twinkle.module` knows, or a class.
            adapter_name: may be left out while there is one adapter.
            options: of its constructor, such as `lr`, and `groups` of parameters with options of their own.

        Raises:
            UnknownComponent: the name is not known.
            InvalidComponentOptions: an option is unknown or out of range.
        """
        with ExitStack() as undo:
            if adapter_name is None and not self.engine.adapter_ids and self._may_train_whole_model:
                get_logger().info('no adapter was added: the weights of %s itself are trained', self.model_id)
                self.add_adapter_to_model(WHOLE_MODEL, full_parameters=True)
                undo.callback(self.remove_adapter, WHOLE_MODEL)
            self.engine.set_optimizer(self._adapter(adapter_name), optimizer_cls, **options)
            undo.pop_all()

    def set_lr_scheduler(self, scheduler_cls: Any, *, adapter_name: str | None = None, **options: Any) -> None:
        """Replace the schedule, given by name or class; arguments and errors as `set_optimizer`."""
        self.engine.set_lr_scheduler(self._adapter(adapter_name), scheduler_cls, **options)

    def set_loss(self, loss_cls: Any, *, adapter_name: str | None = None, **options: Any) -> None:
        """Replace the loss, given by name, class, instance or function; errors as `set_optimizer`.

        A loss that learns values gives the adapter a value head.
        """
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

    def apply_patch(self, patch: Any, **options: Any) -> Patch:
        """Change the base model, before there are adapters on it, and return the patch, to be undone with `unpatch`.

        A sampler that is to agree has to load the model with the same patch.

        Args:
            patch: a name that `twinkle.patch` knows, a class or an instance.
            options: of its constructor.

        Raises:
            UnknownComponent: the name is not known.
            InvalidComponentOptions: an option is unknown or out of range.
            PatchError: the model is none this patch is for, or there are adapters, which were made for it as it is.
        """
        if self.engine.adapter_ids:
            name = patch if isinstance(patch, str) else getattr(patch, '__name__', type(patch).__name__)
            raise PatchError(name, f'there are adapters already ({", ".join(self.engine.adapter_ids)}); patch before')
        return apply_patch(self.engine.model.backbone, patch, **options)

    def get_train_configs(self, *, adapter_name: str | None = None) -> str:
        """Describe how the adapter is trained, for people."""
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
    """Return lines about what is trained; without a configuration it is the base model itself."""
    if config is None:
        return ["weights: the base model's own"]
    return [
        f'lora: r={config.r}, alpha={config.lora_alpha}, dropout={config.lora_dropout}, seed={config.seed}',
        f'target_modules: {config.target_modules}',
    ]
