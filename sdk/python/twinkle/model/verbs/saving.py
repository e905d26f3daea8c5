"""Methods that save, load, resume and upload an adapter's state."""

import os
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from twinkle.blocking import result_of
from twinkle.checkpoint_engine import export_merged
from twinkle.hub import Uploaded, token_variable, upload_later
from twinkle.infra import is_first_rank
from twinkle.model.checkpoint_folder import TRAINER_STATE_FILE, read_checkpoint, write_checkpoint
from twinkle.model.engine import AdapterSnapshot
from twinkle.model.engine.snapshot import trainer_state
from twinkle.model.errors import InvalidArgument
from twinkle.model.model_checkpoint import read_model_checkpoint, write_model_checkpoint
from twinkle.model.verbs.handle import ModelHandle
from twinkle.nn import FullWeights

SAVE_DIR_VARIABLE = 'TWINKLE_DEFAULT_SAVE_DIR'
"""Environment variable with the default of `output_dir`; ./output if it is unset."""


class SavingVerbs(ModelHandle):
    """Checkpoint methods. `adapter_name` is optional for a single adapter; for its errors see `chosen_adapter`."""

    def save(
        self,
        name: str,
        output_dir: str | None = None,
        *,
        adapter_name: str | None = None,
        save_optimizer: bool = False,
        consumed_train_samples: int = 0,
        merge_lora: bool = False,
    ) -> str:
        """Save a checkpoint as a peft folder or a whole model, replacing a checkpoint of the same name.

        A value head is saved in a separate file. A full-parameter run is saved as a whole model in float32, with the
        digests of all files; the state for resuming is in a folder that `torch.distributed.checkpoint` writes.

        Args:
            name: name of the folder.
            output_dir: parent folder. None uses `TWINKLE_DEFAULT_SAVE_DIR`, or ./output if that is unset.
            adapter_name: optional while there is one adapter.
            save_optimizer: whether to save the state for resuming too.
            consumed_train_samples: position in the data, saved with the optimizer.
            merge_lora: whether to save the base model with the merged adapter, which any tool can load; it cannot be
                resumed.

        Returns:
            Path of the folder.

        Raises:
            InvalidArgument: the name is invalid, an optimizer is requested for a merged model, or there is no adapter
                to merge.
            AdapterMismatch, InvalidModelFolder: a whole model is written, and the base model's folder does not fit it,
                or is malformed.
            OSError: writing failed; an existing checkpoint of a full-parameter run is unchanged.
        """
        if merge_lora and save_optimizer:
            raise InvalidArgument('a merged model has no optimizer state; save twice, or leave out save_optimizer')
        weights = self.engine.adapter(self._adapter(adapter_name)).weights
        if merge_lora and isinstance(weights, FullWeights):
            raise InvalidArgument('a full-parameter run has no adapter to merge; leave out merge_lora')
        snapshot = self.engine.export_state(
            self._adapter(adapter_name),
            is_optimizer_included=save_optimizer,
            consumed_train_samples=consumed_train_samples,
        )
        folder = _checkpoint_folder(name, output_dir)
        if snapshot.lora_config is None and not merge_lora:
            write_model_checkpoint(folder, snapshot, base_folder=self._folder, ranks=self._shares)
        else:
            self._shares.on_first(f'saved {name}', lambda: self._write(folder, snapshot, is_merged=merge_lora))
        return str(folder)

    def load(
        self,
        name: str,
        output_dir: str | None = None,
        *,
        adapter_name: str | None = None,
        load_optimizer: bool = False,
    ) -> None:
        """Replace the adapter's weights with the weights of a checkpoint, including a value head, if any.

        Args:
            name: name of the folder, or the path that `save` returned.
            output_dir: parent folder, see `save`; it has no effect on a path.
            adapter_name: optional while there is one adapter.
            load_optimizer: whether to restore optimizer, schedule, counters, random state and accumulated gradient too.
                Otherwise, the accumulated gradient is cleared.

        Raises:
            InvalidArgument: the name is empty.
            SnapshotMismatch: the checkpoint does not match the adapter, or it is incomplete or damaged; nothing was
                changed.
        """
        adapter = self._adapter(adapter_name)
        folder = Path(name) if _is_path(name) else _checkpoint_folder(name, output_dir)
        snapshot = self._read(adapter, folder)
        self.engine.import_state(adapter, snapshot, is_optimizer_included=load_optimizer)

    def resume_from_checkpoint(
        self, checkpoint_dir: str, *, resume_only_model: bool = False, adapter_name: str | None = None
    ) -> Mapping[str, int]:
        """Resume from a checkpoint that was saved with its optimizer, or load only its weights.

        Args:
            checkpoint_dir: folder of the checkpoint.
            resume_only_model: whether to load only the weights and return no counters.
            adapter_name: optional while there is one adapter.

        Returns:
            `cur_step`, `gradient_accumulation_steps` and `consumed_train_samples` as saved.

        Raises:
            SnapshotMismatch: the checkpoint does not match the adapter, or lacks the optimizer that is to be loaded.
        """
        name = self._adapter(adapter_name)
        snapshot = self._read(name, Path(checkpoint_dir))
        self.engine.import_state(name, snapshot, is_optimizer_included=not resume_only_model)
        if resume_only_model:
            return {}
        numbers = trainer_state(snapshot)
        return {
            'cur_step': numbers['step_count'],
            'gradient_accumulation_steps': numbers['gradient_accumulation_steps'],
            'consumed_train_samples': numbers['extra'].get('consumed_train_samples', 0),
        }

    def upload_to_hub(
        self,
        checkpoint_dir: str,
        hub_model_id: str,
        hub_token: str | None = None,
        async_upload: bool = True,  # noqa: FBT001, FBT002 - an established signature
        *,
        adapter_name: str | None = None,
    ) -> Future[Uploaded]:
        """Upload the weights and the configuration of a saved checkpoint, without the state for resuming.

        Args:
            checkpoint_dir: folder returned by `save`; it must not change until the upload is done.
            hub_model_id: `hf://org/name` or `ms://org/name`; a new repository is created as private.
            hub_token: token with write access. None uses `HF_TOKEN`, or `MODELSCOPE_API_TOKEN` for `ms://`.
            async_upload: whether to upload in the background; the program waits for the upload before it exits.
            adapter_name: has no effect, but a given adapter must exist.

        Returns:
            Future of the uploaded location; already done without `async_upload`. In a program of several processes,
            only the first process uploads. The other processes return a future that is done, with an empty location.

        Raises:
            HubError: the id is invalid, there is no token, or the folder has nothing to upload.
            UploadRefused: the hub refused the upload; with `async_upload`, `.result()` raises it.
            HubUnreachable: the hub did not respond; with `async_upload`, `.result()` raises it.
        """
        if adapter_name is not None:
            self._adapter(adapter_name)
        token = hub_token or os.environ.get(token_variable(hub_model_id), '')
        if not is_first_rank():
            others = Future[Uploaded]()
            others.set_result(Uploaded(url='', commit=''))
            return others
        uploading = upload_later(checkpoint_dir, hub_model_id, token=token, ignore=(TRAINER_STATE_FILE, '.*'))
        if not async_upload:
            result_of(uploading)
        return uploading

    def get_state_dict(self, *, adapter_name: str | None = None) -> dict[str, torch.Tensor]:
        """Return copies of the adapter's weights under peft's names.

        The weights of a full-parameter run have the model's parameter names. If `fsdp` ranks divide them, every process
        must call this method.
        """
        state = self.engine.adapter(self._adapter(adapter_name)).weights.peft_state()
        return {
            name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()
            for name, tensor in state.items()
        }

    def _write(self, folder: Path, snapshot: AdapterSnapshot, *, is_merged: bool) -> None:
        if is_merged:
            export_merged(self._folder, snapshot.adapter, snapshot.lora_config, folder)
        else:
            write_checkpoint(folder, snapshot, base_model=self.model_id)

    def _read(self, adapter_name: str, folder: Path) -> AdapterSnapshot:
        state = self.engine.adapter(adapter_name)
        if state.config is not None:
            return read_checkpoint(folder)
        return read_model_checkpoint(
            folder, state.weights.named_parameters(), base_folder=self._folder, ranks=self._shares
        )


def _is_path(name: str) -> bool:
    return Path(name).name != name or name == '..'


def _checkpoint_folder(name: str, output_dir: str | None) -> Path:
    if not name or _is_path(name):
        raise InvalidArgument(f'name must be a folder name without separators, got {name!r}')
    return Path(output_dir or os.environ.get(SAVE_DIR_VARIABLE) or 'output') / name
