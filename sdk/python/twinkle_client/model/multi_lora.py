"""The model handle: adapters of one base model, trained by the model service.

Methods that call the server block; their `.aio` form is a coroutine, and their `.submit` form starts the call and
returns a future. The operations of one adapter are applied in the order in which they are started.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from twinkle.api.model.v1 import adapter_service_pb2
from twinkle.api.model.v1.training_config_pb2 import LOSS_REDUCTION_MEAN, LossConfig, TrainingConfig
from twinkle_client.convert import full_parameter_config, lora_config
from twinkle_client.convert.labels import labels
from twinkle_client.convert.sampling import SCHEME
from twinkle_client.metrics import RunMetrics
from twinkle_client.model.configuring import ConfiguringVerbs
from twinkle_client.model.custom_loss import CustomLossVerbs
from twinkle_client.model.exporting import ExportingVerbs
from twinkle_client.model.handle import AdapterHandle
from twinkle_client.model.operations import OperationLog
from twinkle_client.model.pipeline import Pipeline
from twinkle_client.model.planning import PlanningVerbs
from twinkle_client.model.saving import SavingVerbs
from twinkle_client.model.training import TrainingVerbs
from twinkle_client.model.watching import WatchingVerbs
from twinkle_client.rollouts import RunRollouts
from twinkle_client.rpc import new_id, remote_method

_log = logging.getLogger('twinkle_client')


class MultiLoraTransformersModel(
    ConfiguringVerbs, TrainingVerbs, CustomLossVerbs, SavingVerbs, ExportingVerbs, PlanningVerbs, WatchingVerbs
):
    """A base model on the server, which other tenants share, and the adapters that this program trains on it."""

    @remote_method
    async def add_adapter_to_model(
        self,
        adapter_name: str,
        config_or_dir: Any = None,
        *,
        full_parameters: bool | Sequence[str] = False,
        gradient_accumulation_steps: int = 1,
        user_metadata: Mapping[str, str] | None = None,
    ) -> str:
        """Create an adapter on the server.

        The adapter starts with the loss cross-entropy, averaged over the labels of a step, and the optimizer AdamW.

        Args:
            adapter_name: Name within this handle; other handles may use the same name.
            config_or_dir: A `LoraConfig` of peft or of `twinkle`, or the `twinkle://` path of a checkpoint to start
                from. Unset: a `LoraConfig` with default values.
            full_parameters: Train weights of the base model instead of an adapter: all (True) or the named weights. A
                checkpoint to start from must be of a full-parameter run too. The run leases the model service
                exclusively until the run is removed or its session ends; see docs/training.md.
            gradient_accumulation_steps: Number of batches whose gradients are summed before a step is applied.
            user_metadata: Labels of the run in the catalogue.

        Returns:
            The adapter's id, which is also the id of its run.

        Raises:
            ValueError: The configuration is not supported, or the name is empty or taken.
            TypeError: `config_or_dir` is not a configuration, or a label is not a string.
            NotFoundError: The server has no such base model or checkpoint.
            QuotaError: The tenant or the model service has too many adapters.
            StateError: The model service is leased to another full-parameter run, or refuses the lease for this run.
        """
        self._check_name(adapter_name)
        is_path = isinstance(config_or_dir, str)
        if full_parameters is not False and config_or_dir is not None and not is_path:
            raise ValueError('a LoraConfig cannot be combined with full_parameters; leave config_or_dir out')
        if is_path and not config_or_dir.startswith(SCHEME):
            raise ValueError(f'config_or_dir must be a LoraConfig or a {SCHEME} path, got {config_or_dir!r}')
        request = adapter_service_pb2.CreateAdapterRequest(
            request_id=new_id('rq'),
            base_model=self.model_id,
            lora_config=None if is_path or full_parameters is not False else lora_config(config_or_dir or {}),
            full_parameters=full_parameter_config(names=full_parameters),
            training_config=TrainingConfig(
                loss=LossConfig(reduction=LOSS_REDUCTION_MEAN), gradient_accumulation_steps=gradient_accumulation_steps
            ),
            user_metadata=labels(user_metadata),
            checkpoint_path=config_or_dir if is_path else '',
            session_id=self._client.session_id,
        )
        with self._reserved_name(adapter_name):
            response = await self._connection.unary(self._stub.CreateAdapter, request)
            adapter = response.adapter
            self._attach(adapter_name, adapter.adapter_id, adapter.sequence_number)
        for warning in response.warnings:
            _log.warning('adapter %s: %s', adapter_name, warning)
        return adapter.adapter_id

    @remote_method
    async def attach_adapter(self, adapter_name: str, adapter_id: str) -> None:
        """Attach an existing adapter, for example one that an earlier program created.

        Raises:
            ValueError: The name is empty, or taken in this handle.
            NotFoundError: The server has no adapter with this id.
        """
        request = adapter_service_pb2.GetAdapterRequest(adapter_id=adapter_id)
        with self._reserved_name(adapter_name):
            adapter = (await self._connection.unary(self._stub.GetAdapter, request)).adapter
            self._attach(adapter_name, adapter_id, adapter.sequence_number)

    @remote_method
    async def remove_adapter(self, adapter_name: str | None = None) -> None:
        """Delete an adapter on the server; its checkpoints remain."""
        adapter = self._adapter(adapter_name)
        request = adapter_service_pb2.DeleteAdapterRequest(adapter_id=adapter.adapter_id)
        await self._connection.unary(self._stub.DeleteAdapter, request)
        self._adapters = {name: other for name, other in self._adapters.items() if other is not adapter}
        self._client.adapter_names.remove(self, adapter.adapter_id)

    def pipeline(self, *, adapter_name: str | None = None) -> Pipeline:
        """Return a context manager (`with` or `async with`) that sends the adapter's operations on one stream.

        Operations started with `.submit`, or with `.aio` in tasks, do not wait for the results of earlier operations.
        """
        return Pipeline(self._connection, self._adapter(adapter_name).operations)

    def metrics(self, *, adapter_name: str | None = None) -> RunMetrics:
        """Return an object that logs and reads the metrics of an adapter's run."""
        return RunMetrics(self.adapter_id(adapter_name), client=self._client)

    def rollouts(self, *, adapter_name: str | None = None) -> RunRollouts:
        """Return an object that logs and reads the rollouts of an adapter's run."""
        return RunRollouts(self.adapter_id(adapter_name), client=self._client)

    def _attach(self, adapter_name: str, adapter_id: str, last_number: int) -> None:
        log = OperationLog(self._connection, adapter_id, last_number=last_number)
        self._adapters[adapter_name] = AdapterHandle(adapter_id, log)
        self._client.adapter_names.add(self, adapter_name, adapter_id, base_model=self.model_id)
