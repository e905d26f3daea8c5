"""Verbs about an adapter's state: saved, loaded, published, described."""

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
    """How a checkpoint is kept."""

    overwrite: bool
    """Replace one of that name; otherwise it is an error that there is one."""
    ttl: timedelta | None
    """Delete it after this long. Unset: kept."""
    user_metadata: Mapping[str, str] | None
    """Its labels, for the owner's own use: the server takes 64, and `list_checkpoints` finds it by them."""


class SavingVerbs(ModelHandle):
    """Each takes `adapter_name`; without it the only adapter is meant."""

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
        """Save a durable checkpoint; `export_merged` writes a merged model.

        Args:
            name: within the run.
            save_optimizer: optimizer, schedule, counters and random state too, so that training can resume.
            consumed_train_samples: the data cursor, such as `loader.get_state()['consumed_train_samples']`,
                for `resume_from_checkpoint` to give back. Needs `save_optimizer`.
            adapter_name: unset: the only adapter.
            options: `overwrite`, `ttl` and `user_metadata`, see `SaveOptions`.

        Returns:
            Its path, `twinkle://<run>/weights/<name>`.

        Raises:
            ConflictError: there is one of that name.
            TypeError: there is no such option, or a label is no string.
            UsageError: a data cursor is negative, or comes without the optimizer; a label is too long, or one of
                too many.
        """
        if unknown := sorted(set(options) - set(SaveOptions.__annotations__)):
            raise TypeError(f'save has no arguments {unknown}')
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
        """Replace the adapter's weights by a checkpoint's.

        Raises:
            NotFoundError: there is no checkpoint at that path.
            UsageError: its LoRA configuration is another one.
        """
        verb = operation_pb2.Load(checkpoint_path=path, is_optimizer_included=load_optimizer)
        await self._run(adapter_name, load=verb)

    @remote_method
    async def resume_from_checkpoint(
        self, path: str, *, resume_only_model: bool = False, adapter_name: str | None = None
    ) -> dict[str, int]:
        """Go on from a checkpoint saved with its optimizer.

        Args:
            path: `twinkle://<run>/weights/<name>`.
            resume_only_model: load the weights alone and return no counters.
            adapter_name: unset: the only adapter.

        Returns:
            `cur_step`, `gradient_accumulation_steps` and `consumed_train_samples` as saved; the last is 0
            where none was.

        Raises:
            NotFoundError: there is no checkpoint at that path.
            UsageError: its LoRA configuration is another one, or it was saved without its optimizer.
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
        """Make the current weights the next version, for samplers to use; return its number.

        Args:
            is_pinned: keep it until it is unpinned.
            dtype: element type of the published weights: 'float32', 'bfloat16' or 'float16'. One narrower than the
                trainer's is rounded to the nearest, and the answer warns of it. Unset: the trainer's own.
            adapter_name: the adapter; unset where there is only one.
        """
        number = None if dtype is None else dtype_number(dtype)
        verb = operation_pb2.PublishVersion(is_pinned=is_pinned, dtype=number)
        return (await self._run(adapter_name, publish_version=verb)).publish.version

    @remote_method
    async def undo(self, steps: int = 1, *, adapter_name: str | None = None) -> StepOutput:
        """Go back to right before the operation that applied the last step, or one of those before it.

        Weights, optimizer, schedule, configuration, metrics and random state go back; the accumulated
        gradient is dropped. Published versions and saved checkpoints stay.

        Args:
            steps: optimizer steps, at least 1.
            adapter_name: unset: the only adapter.

        Returns:
            Where the adapter is now.

        Raises:
            StateError: so many are not kept; the message says how many are.
        """
        return step_output(await self._run(adapter_name, undo=operation_pb2.Undo(step_count=steps)))

    @remote_method
    async def export_merged(self, name: str, *, adapter_name: str | None = None) -> str:
        """Write the base model with the adapter merged into it, as a plain model folder.

        The folder stays when the adapter is removed; whoever runs the service deletes it.

        Args:
            name: of the export, within the run.
            adapter_name: unset: the only adapter.

        Returns:
            The folder, on the machine of the service; its path where the service does not tell that.
        """
        save = (await self._run(adapter_name, export_merged=operation_pb2.ExportMerged(name=name))).save
        return save.folder or save.checkpoint_path

    @remote_method
    async def get_adapter(self, *, adapter_name: str | None = None) -> adapter_pb2.Adapter:
        """Return the adapter as the service knows it, its configuration with every default filled in."""
        return await self._get(adapter_name)

    @remote_method
    async def get_train_configs(self, *, adapter_name: str | None = None) -> dict[str, Any]:
        """Return the adapter's LoRA and training configuration as plain values."""
        adapter = await self._get(adapter_name)
        return {
            'adapter_id': adapter.adapter_id,
            'lora_config': json_format.MessageToDict(adapter.lora_config, preserving_proto_field_name=True),
            **json_format.MessageToDict(adapter.training_config, preserving_proto_field_name=True),
        }

    async def _get(self, adapter_name: str | None) -> adapter_pb2.Adapter:
        request = adapter_service_pb2.GetAdapterRequest(adapter_id=self._adapter(adapter_name).adapter_id)
        return (await self._connection.unary(self._stub.GetAdapter, request)).adapter
