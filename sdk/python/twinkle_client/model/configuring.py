"""Methods that configure an adapter's training."""

from typing import Any

from twinkle.api.model.v1 import operation_pb2
from twinkle.api.model.v1.training_config_pb2 import TrainingConfig
from twinkle_client import convert
from twinkle_client.model.handle import ModelHandle
from twinkle_client.rpc import remote_method


class ConfiguringVerbs(ModelHandle):
    """Methods that configure the training components. A component is given by name or class, with its arguments."""

    @remote_method
    async def set_loss(
        self, loss_cls: Any, *, adapter_name: str | None = None, reduction: str | None = None, **options: Any
    ) -> None:
        """Set the loss.

        Args:
            loss_cls: Name or class, such as 'GRPOLoss'; `TwinkleClient.get_server_info` lists the names.
            adapter_name: Unset: the only adapter.
            reduction: 'mean' divides the gradient by the number of accumulated labels at the step, 'sum' does not.
                Only CrossEntropyLoss and SoftCrossEntropyLoss offer this choice, with 'mean' as the default; other
                losses define their own scaling.
            options: Arguments of the loss.

        Raises:
            ValueError: The reduction is unknown.
            UsageError: The server has no such loss, or the loss has no such argument.
        """
        loss = convert.loss_config(loss_cls, options, reduction=reduction)
        await self._configure(adapter_name, TrainingConfig(loss=loss))

    @remote_method
    async def set_optimizer(
        self, optimizer_cls: Any = 'AdamW', *, adapter_name: str | None = None, **options: Any
    ) -> None:
        """Set the optimizer. This resets the optimizer's state, and the schedule has to be set again.

        Args:
            optimizer_cls: Name or class of torch.optim.
            adapter_name: Unset: the only adapter.
            options: Arguments of the optimizer, including `lr`; and `groups`, a list of mappings such as
                `{'pattern': 'lora_B', 'lr': 1.6e-3}` that override arguments for the parameters whose path matches
                the pattern. The first matching group applies.

        Raises:
            ValueError: A group is malformed.
            UsageError: The server has no such optimizer or argument, or a pattern matches no parameter.
        """
        optimizer = convert.optimizer_config(optimizer_cls, options)
        await self._configure(adapter_name, TrainingConfig(optimizer=optimizer))

    @remote_method
    async def set_lr_scheduler(self, scheduler_cls: Any, *, adapter_name: str | None = None, **options: Any) -> None:
        """Set the learning rate schedule; `lr_step` and `clip_grad_and_step` advance it.

        Raises:
            UsageError: The server has no such schedule or argument.
        """
        scheduler = convert.scheduler_config(scheduler_cls, options)
        await self._configure(adapter_name, TrainingConfig(lr_scheduler=scheduler))

    @remote_method
    async def set_template(self, template_cls: Any, *, adapter_name: str | None = None, **options: Any) -> None:
        """Set the template for batches of chats. The server does not support such batches yet.

        Raises:
            UsageError: The server has no such template or argument.
        """
        template = convert.component_config(template_cls, options)
        await self._configure(adapter_name, TrainingConfig(template=template))

    @remote_method
    async def set_processor(self, processor_cls: Any, *, adapter_name: str | None = None, **options: Any) -> None:
        """Set the input processor.

        Raises:
            UsageError: The server has no such processor or argument.
        """
        processor = convert.component_config(processor_cls, options)
        await self._configure(adapter_name, TrainingConfig(processor=processor))

    @remote_method
    async def add_metric(
        self, metric_cls: Any, *, is_training: bool = True, adapter_name: str | None = None, **options: Any
    ) -> None:
        """Collect a metric from now on; `calculate_metric` reports it.

        Args:
            metric_cls: Name or class.
            is_training: Collect from training batches if True, from forward-only batches if False.
            adapter_name: Unset: the only adapter.
            options: Arguments of the metric.

        Raises:
            UsageError: The server has no such metric or argument.
        """
        metrics = [convert.component_config(metric_cls, options)]
        change = TrainingConfig(metrics=metrics) if is_training else TrainingConfig(evaluation_metrics=metrics)
        await self._configure(adapter_name, change)

    @remote_method
    async def apply_patch(self, patch_cls: Any, *, adapter_name: str | None = None, **options: Any) -> None:
        """Request a patch of the model. The server refuses all patches, because only its operator may choose them.

        Raises:
            UsageError: The server refuses the patch.
        """
        patch = convert.component_config(patch_cls, options)
        await self._configure(adapter_name, TrainingConfig(patches=[patch]))

    async def _configure(self, adapter_name: str | None, change: TrainingConfig) -> None:
        await self._run(adapter_name, configure=operation_pb2.Configure(training_config=change))
