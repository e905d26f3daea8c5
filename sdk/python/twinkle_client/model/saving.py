"""Methods that save, load, publish and describe an adapter's state."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, TypedDict, Unpack

from google.protobuf import duration_pb2, json_format

from twinkle.api.model.v1 import adapter_pb2, adapter_service_pb2, operation_pb2
from twinkle_client.convert.labels import labels
from twinkle_client.convert.tensors import dtype_number
from twinkle_client.model.handle import ModelHandle
from twinkle_client.model.training import StepOutput, step_output
from twinkle_client.rpc import remote_method


class SaveOptions(TypedDict, total=False):
    """Storage options of a checkpoint."""

    overwrite: bool
    """Replace an existing checkpoint with the same name. If False, an existing checkpoint is an error."""
    ttl: timedelta | None
    """Time after which the checkpoint is deleted. Unset: never."""
    user_metadata: Mapping[str, str] | None
    """Labels of the checkpoint, at most 64. `list_checkpoints` can filter by up to 16 labels."""


class SavingVerbs(ModelHandle):
    """Methods for the adapter's state; `adapter_name` may be omitted if there is one adapter."""

    @remote_method
    async def save(
        self,
        name: str,
        *,
        save_optimizer: bool = False,
        consumed_train_samples: int | None = None,
        adapter_name: str | None = None,
        **options: Unpack[SaveOptions],
    ) -> str:
        """Save a durable checkpoint of the adapter; `export_merged` writes a merged model instead.

        Args:
            name: Name of the checkpoint within the run.
            save_optimizer: Include optimizer, schedule, counters and random state, so that training can resume.
            consumed_train_samples: Data cursor, such as `loader.get_state()['consumed_train_samples']`, that
                `resume_from_checkpoint` returns. Requires `save_optimizer`.
            adapter_name: Unset: the only adapter.
            options: `overwrite`, `ttl` and `user_metadata`, see `SaveOptions`.

        Returns:
            The checkpoint's path, `twinkle://<run>/weights/<name>`.

        Raises:
            ConflictError: A checkpoint with this name exists, and `overwrite` is not set.
            TypeError: An option is unknown, or a label is not a string.
            UsageError: The name or `ttl` is invalid, the data cursor is negative or given without `save_optimizer`, a
                label is too long, or there are too many labels.
            QuotaError: The tenant's storage is full.
        """
        if unknown := sorted(set(options) - set(SaveOptions.__annotations__)):
            raise TypeError(f'save has no arguments {unknown}; its options are {sorted(SaveOptions.__annotations__)}')
        verb = operation_pb2.Save(
            name=name,
            is_optimizer_included=save_optimizer,
            is_overwrite_allowed=options.get('overwrite', False),
            consumed_train_samples=consumed_train_samples,
            user_metadata=labels(options.get('user_metadata')),
        )
        if (ttl := options.get('ttl')) is not None:
            duration = duration_pb2.Duration()
            duration.FromTimedelta(ttl)
            verb.ttl.CopyFrom(duration)
        return (await self._run(adapter_name, save=verb)).save.checkpoint_path

    @remote_method
    async def load(self, path: str, *, load_optimizer: bool = False, adapter_name: str | None = None) -> None:
        """Replace the adapter's weights with the weights of a checkpoint, and clear the accumulated gradient.

        Args:
            path: `twinkle://<run>/weights/<name>`.
            load_optimizer: Also load the saved optimizer, schedule, counters and random state.
            adapter_name: Unset: the only adapter.

        Raises:
            NotFoundError: There is no checkpoint at this path.
            UsageError: The checkpoint has a different LoRA configuration, or lacks the optimizer that was requested.
        """
        verb = operation_pb2.Load(checkpoint_path=path, is_optimizer_included=load_optimizer)
        await self._run(adapter_name, load=verb)

    @remote_method
    async def resume_from_checkpoint(
        self, path: str, *, resume_only_model: bool = False, adapter_name: str | None = None
    ) -> dict[str, int]:
        """Resume training from a checkpoint that includes its optimizer.

        Args:
            path: `twinkle://<run>/weights/<name>`.
            resume_only_model: Load only the weights and return an empty dictionary.
            adapter_name: Unset: the only adapter.

        Returns:
            The saved `cur_step`, `gradient_accumulation_steps` and `consumed_train_samples`. A data cursor that was not
            saved is 0.

        Raises:
            NotFoundError: There is no checkpoint at this path.
            UsageError: The checkpoint has a different LoRA configuration, or was saved without its optimizer.
        """
        verb = operation_pb2.Load(checkpoint_path=path, is_optimizer_included=not resume_only_model)
        loaded = (await self._run(adapter_name, load=verb)).load
        if resume_only_model:
            return {}
        return {
            'cur_step': loaded.step_count,
            'gradient_accumulation_steps': loaded.gradient_accumulation_steps,
            'consumed_train_samples': loaded.consumed_train_samples,
        }

    @remote_method
    async def publish_version(
        self, *, is_pinned: bool = False, dtype: str | None = None, adapter_name: str | None = None
    ) -> int:
        """Publish the current weights as the next version for samplers; return the version number.

        Args:
            is_pinned: Keep the version until it is unpinned.
            dtype: Element type of the published weights: 'float32', 'bfloat16' or 'float16'. A type narrower than
                the type of the trained weights rounds to nearest and logs a warning. Unset: the type of the weights.
            adapter_name: Unset: the only adapter.

        Raises:
            ValueError: `dtype` is unknown.
            QuotaError: The version is to be pinned, and the adapter has the maximum number of pinned versions.
        """
        number = None if dtype is None else dtype_number(dtype)
        verb = operation_pb2.PublishVersion(is_pinned=is_pinned, dtype=number)
        return (await self._run(adapter_name, publish_version=verb)).publish.version

    @remote_method
    async def undo(self, steps: int = 1, *, adapter_name: str | None = None) -> StepOutput:
        """Undo the last optimizer steps and everything after them.

        Weights, optimizer, schedule, configuration, metrics and random state are restored; the accumulated gradient
        is cleared. Published versions and saved checkpoints remain.

        Args:
            steps: Number of optimizer steps to undo, at least 1.
            adapter_name: Unset: the only adapter.

        Returns:
            The state of the adapter after the undo.

        Raises:
            StateError: The server stores fewer steps; the message contains their number.
        """
        return step_output(await self._run(adapter_name, undo=operation_pb2.Undo(step_count=steps)))

    @remote_method
    async def export_merged(self, name: str, *, adapter_name: str | None = None) -> str:
        """Write a model folder with the adapter merged into the base model.

        The folder remains when the adapter is removed; the operator of the service deletes it.

        Args:
            name: Name of the export within the run.
            adapter_name: Unset: the only adapter.

        Returns:
            The folder, relative to the state folder of the model service.

        Raises:
            UsageError: The name is invalid, or the adapter cannot be merged.
            QuotaError: The tenant has the maximum number of merged models.
        """
        return (await self._run(adapter_name, export_merged=operation_pb2.ExportMerged(name=name))).save.folder

    @remote_method
    async def get_adapter(self, *, adapter_name: str | None = None) -> adapter_pb2.Adapter:
        """Return the adapter's record, with all defaults of its configuration filled in."""
        return await self._get(adapter_name)

    @remote_method
    async def get_train_configs(self, *, adapter_name: str | None = None) -> dict[str, Any]:
        """Return the adapter's LoRA and training configuration as JSON-like values."""
        adapter = await self._get(adapter_name)
        return {
            'adapter_id': adapter.adapter_id,
            'lora_config': json_format.MessageToDict(adapter.lora_config, preserving_proto_field_name=True),
            **json_format.MessageToDict(adapter.training_config, preserving_proto_field_name=True),
        }

    async def _get(self, adapter_name: str | None) -> adapter_pb2.Adapter:
        request = adapter_service_pb2.GetAdapterRequest(adapter_id=self._adapter(adapter_name).adapter_id)
        return (await self._connection.unary(self._stub.GetAdapter, request)).adapter
