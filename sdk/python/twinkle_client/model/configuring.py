"""Verbs that say how an adapter is trained."""

from typing import Any

from twinkle.api.model.v1 import operation_pb2
from twinkle.api.model.v1.training_config_pb2 import TrainingConfig
from twinkle_client import convert
from twinkle_client.model.handle import ModelHandle
from twinkle_client.rpc import remote_method


class ConfiguringVerbs(ModelHandle):
    """Components are given by name or class, their arguments beside them; the server knows the names."""

    @remote_method
    async def set_loss(
        self, loss_cls: Any, *, adapter_name: str | None = None, reduction: str | None = None, **options: Any
    ) -> None:
        """Choose the loss.

        Args:
            loss_cls: name or class, such as 'GRPOLoss'; `TwinkleClient.get_server_info` lists them.
            adapter_name: unset: the only adapter.
            reduction: 'mean': the gradient is divided at the step by the labels it gathered; 'sum': it is not.
                For the losses that offer the choice, where unset is 'mean': CrossEntropyLoss and
                SoftCrossEntropyLoss. The others define their own scaling.
            options: the loss's arguments.

        Raises:
            ValueError: the reduction is unknown.
            UsageError: the server knows no such loss or argument.
        """
        loss = convert.loss_config(loss_cls, options, reduction=reduction)
        await self._configure(adapter_name, TrainingConfig(loss=loss))

    @remote_method
    async def set_optimizer(
        self, optimizer_cls: Any = 'AdamW', *, adapter_name: str | None = None, **options: Any
    ) -> None:
        """Choose the optimizer; its state begins anew, and the schedule must be set again.

        Args:
            optimizer_cls: name or class of torch.optim.
            adapter_name: unset: the only adapter.
            options: its arguments, `lr` among them; and `groups`: a list of mappings such as
                `{'pattern': 'lora_B', 'lr': 1.6e-3}` with what differs for the parameters whose path
                the pattern matches. The first group that matches counts.

        Raises:
            ValueError: a group is malformed.
            UsageError: the server knows no such optimizer or argument, or a pattern matches nothing.
        """
        optimizer = convert.optimizer_config(optimizer_cls, options)
        await self._configure(adapter_name, TrainingConfig(optimizer=optimizer))

    @remote_method
    async def set_lr_scheduler(self, scheduler_cls: Any, *, adapter_name: str | None = None, **options: Any) -> None:
        """Choose the schedule; it moves by `lr_step` and `clip_grad_and_step`.

        Raises:
            UsageError: the server knows no such schedule or argument.
        """
        scheduler = convert.scheduler_config(scheduler_cls, options)
        await self._configure(adapter_name, TrainingConfig(lr_scheduler=scheduler))

    @remote_method
    async def set_template(self, template_cls: Any, *, adapter_name: str | None = None, **options: Any) -> None:
        """Choose the template for batches given as chats.

        Raises:
            UsageError: the server knows no such template or argument.
        """
        template = convert.component_config(template_cls, options)
        await self._configure(adapter_name, TrainingConfig(template=template))

    @remote_method
    async def set_processor(self, processor_cls: Any, *, adapter_name: str | None = None, **options: Any) -> None:
        """Choose the input processor.

        Raises:
            UsageError: the server knows no such processor or argument.
        """
        processor = convert.component_config(processor_cls, options)
        await self._configure(adapter_name, TrainingConfig(processor=processor))

    @remote_method
    async def add_metric(
        self, metric_cls: Any, *, is_training: bool = True, adapter_name: str | None = None, **options: Any
    ) -> None:
        """Gather a metric from now on; `calculate_metric` reports it.

        Args:
            metric_cls: name or class.
            is_training: of training batches; else of forward-only ones.
            adapter_name: unset: the only adapter.
            options: its arguments.

        Raises:
            UsageError: the server knows no such metric or argument.
        """
        metrics = [convert.component_config(metric_cls, options)]
        change = TrainingConfig(metrics=metrics) if is_training else TrainingConfig(evaluation_metrics=metrics)
        await self._configure(adapter_name, change)

    @remote_method
    async def apply_patch(self, patch_cls: Any, *, adapter_name: str | None = None, **options: Any) -> None:
        """Apply a model patch.

        Raises:
            UsageError: the server knows no such patch or argument.
        """
        patch = convert.component_config(patch_cls, options)
        await self._configure(adapter_name, TrainingConfig(patches=[patch]))

    async def _configure(self, adapter_name: str | None, change: TrainingConfig) -> None:
        await self._run(adapter_name, configure=operation_pb2.Configure(training_config=change))
