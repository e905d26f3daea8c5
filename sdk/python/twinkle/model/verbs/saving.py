"""Verbs about an adapter's state: saved, loaded, resumed."""

import os
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path

import torch

from twinkle.checkpoint_engine import export_merged
from twinkle.hub import Uploaded, token_variable, upload_later
from twinkle.model.checkpoint_folder import TRAINER_STATE_FILE, read_checkpoint, write_checkpoint
from twinkle.model.engine import AdapterSnapshot
from twinkle.model.engine.snapshot import trainer_state
from twinkle.model.errors import InvalidArgument
from twinkle.model.verbs.handle import ModelHandle

SAVE_DIR_VARIABLE = 'TWINKLE_DEFAULT_SAVE_DIR'
"""Environment variable: where checkpoints go unless `output_dir` says otherwise; unset: ./output."""


class SavingVerbs(ModelHandle):
    """Each takes `adapter_name`; without it the only adapter is meant."""

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
        """Save a checkpoint, replacing one of the same name: a peft folder, or a whole model.

        A value head goes with it, in a file of its own. Where the base model's own weights are trained, the folder is
        a whole model in float32.

        Args:
            name: of the folder.
            output_dir: where it goes. Unset: `TWINKLE_DEFAULT_SAVE_DIR`, else ./output.
            adapter_name: may be left out while there is one adapter.
            save_optimizer: keep what it takes to resume, too.
            consumed_train_samples: the data cursor, kept with it where the optimizer is.
            merge_lora: write the base model with the adapter merged in, which any tool loads; it cannot
                be resumed.

        Returns:
            The folder.

        Raises:
            InvalidArgument: the name is none, or a merged model is to keep an optimizer.
        """
        if merge_lora and save_optimizer:
            raise InvalidArgument('a merged model keeps no optimizer; save it twice, or leave out save_optimizer')
        snapshot = self.engine.export_state(
            self._adapter(adapter_name),
            is_optimizer_included=save_optimizer,
            consumed_train_samples=consumed_train_samples,
        )
        folder = _checkpoint_folder(name, output_dir)
        if merge_lora:
            export_merged(self._folder, snapshot.adapter, snapshot.lora_config, folder)
        else:
            write_checkpoint(folder, snapshot, base_model=self.model_id, base_folder=self._folder)
        return str(folder)

    def load(
        self,
        name: str,
        output_dir: str | None = None,
        *,
        adapter_name: str | None = None,
        load_optimizer: bool = False,
    ) -> None:
        """Replace the adapter's weights by a checkpoint's, and its value head where the checkpoint has one.

        Args:
            name: of the folder.
            output_dir: where it is, as in `save`.
            adapter_name: may be left out while there is one adapter.
            load_optimizer: go on with optimizer, schedule, counters and random state too.

        Raises:
            SnapshotMismatch: it does not fit the adapter; nothing was changed.
        """
        adapter = self._adapter(adapter_name)
        snapshot = self._read(adapter, _checkpoint_folder(name, output_dir))
        self.engine.import_state(adapter, snapshot, is_optimizer_included=load_optimizer)

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
        async_upload: bool = True,  # noqa: FBT001, FBT002 - an established name and place
        *,
        adapter_name: str | None = None,
    ) -> Future[Uploaded]:
        """Upload a checkpoint that was saved: its weights and configuration, without what it takes to resume.

        Args:
            checkpoint_dir: the folder that `save` returned. It must stay as it is until the upload is done.
            hub_model_id: `hf://org/name` or `ms://org/name`; a repository that is made there is private.
            hub_token: of someone who may write there. Unset: `HF_TOKEN`, or `MODELSCOPE_API_TOKEN` for `ms://`.
            async_upload: return at once, and upload in the background; a program that ends waits for it.
            adapter_name: makes no difference here, but must be known.

        Returns:
            What gives `.done()`, and by `.result()` where it went; done already without `async_upload`.

        Raises:
            HubError: the id names no repository, there is no token, or the folder has nothing to upload.
            UploadRefused: the hub does not take it; with `async_upload`, `.result()` raises this.
            HubUnreachable: the hub did not answer; with `async_upload`, `.result()` raises this.
        """
        if adapter_name is not None:
            self._adapter(adapter_name)
        token = hub_token or os.environ.get(token_variable(hub_model_id), '')
        uploading = upload_later(checkpoint_dir, hub_model_id, token=token, ignore=(TRAINER_STATE_FILE, '.*'))
        if not async_upload:
            uploading.result()
        return uploading

    def get_state_dict(self, *, adapter_name: str | None = None) -> dict[str, torch.Tensor]:
        """Return copies of the adapter's weights under peft's names."""
        state = self.engine.adapter(self._adapter(adapter_name)).weights.peft_state()
        return {name: tensor.clone() for name, tensor in state.items()}

    def _read(self, adapter_name: str, folder: Path) -> AdapterSnapshot:
        state = self.engine.adapter(adapter_name)
        return read_checkpoint(folder, whole=None if state.config is not None else tuple(state.weights.peft_state()))


def _checkpoint_folder(name: str, output_dir: str | None) -> Path:
    if not name or Path(name).name != name:
        raise InvalidArgument(f'name must be the name of a folder, without separators, got {name!r}')
    return Path(output_dir or os.environ.get(SAVE_DIR_VARIABLE) or 'output') / name
