"""The sampler handle, with the names of the library. The server chooses the engine."""

import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from twinkle.api.sampler.v1 import sampler_service_pb2, sampling_pb2
from twinkle.api.sampler.v1.sampler_service_pb2_grpc import SamplerServiceStub
from twinkle.data_format import SampleResponse, SampleResults, SamplingParams
from twinkle_client import convert
from twinkle_client.client import TwinkleClient, current_client
from twinkle_client.convert.config import component_name
from twinkle_client.errors import RetryableError
from twinkle_client.rpc import LoopThread, new_id, remote_method, remote_stream
from twinkle_client.sampler.results import (
    SampleDelta,
    delta_from_proto,
    end_from_proto,
    sample_response,
)
from twinkle_client.transfer import MAX_FAILURES

_log = logging.getLogger('twinkle_client')
Params = SamplingParams | Mapping[str, Any] | None


class Sampler:
    """Samples from a base model, with or without an adapter.

    Methods select the weights with `adapter_name` or `adapter_uri`. `adapter_name` is a name passed to
    `add_adapter_to_model`, or an adapter's id; `version` or `min_version` can be added. `adapter_uri` is the
    path of a checkpoint. A name that several model handles use is ambiguous, unless exactly one of these adapters was
    synced to this sampler.

    Without a selection, the version last synced by `CheckpointEngineManager.sync_weights` is used; if several adapters
    were synced, the call fails. The base model is used if no version was synced or if `use_base_model` is true. The
    server never substitutes other weights. `wait` (a timedelta, default 10 seconds) limits the time until the version
    is available.

    Args:
        model_id: Name of the base model, as reported by `TwinkleClient.get_server_info`.
        client: Unset: the client initialized last.

    Raises:
        RuntimeError: There is no client.
    """

    def __init__(self, model_id: str, *, client: TwinkleClient | None = None) -> None:
        self.model_id = model_id
        self._client = current_client(client)
        self._connection = self._client.connection
        self._stub = SamplerServiceStub(self._connection.channel)
        self._is_thinking_enabled: bool | None = None
        self._synced: dict[str, int] = {}

    @property
    def loop_thread(self) -> LoopThread:
        """Event loop that runs the methods."""
        return self._connection.loop_thread

    def set_template(self, template_cls: Any = 'Template', *, model_id: str = '', enable_thinking: bool = True) -> None:
        """Set options of the chat template. The sampler always uses the base model's chat template.

        Args:
            template_cls: Name or class; a name other than 'Template' is logged and ignored.
            model_id: Model of the template; must be the sampler's model if given.
            enable_thinking: Whether the model may think before it answers.

        Raises:
            ValueError: `model_id` is a different model.
        """
        if model_id not in {'', self.model_id}:
            raise ValueError(f'model_id must be {self.model_id!r}, got {model_id!r}')
        if component_name(template_cls) != 'Template':
            _log.info('%s ignored; using the chat template of %s', component_name(template_cls), self.model_id)
        self._is_thinking_enabled = enable_thinking

    @remote_method
    async def sample(
        self,
        inputs: Any,
        sampling_params: Params = None,
        adapter_name: str = '',
        *,
        num_samples: int | None = None,
        **adapter: Any,
    ) -> SampleResults:
        """Complete prompts.

        Args:
            inputs: One or more prompts: chats, features, token ids or strings.
            sampling_params: Parameters, as an object or a mapping.
            adapter_name: See the class.
            num_samples: Completions per prompt; overrides `sampling_params`.
            adapter: `adapter_uri`, `version`, `min_version`, `wait`, `use_base_model`; see the class.

        Returns:
            One response per prompt, in order.

        Raises:
            TypeError: An argument in `adapter` is unknown.
            ValueError: An argument cannot be sent, or the selection of the adapter is ambiguous.
            NotFoundError: The model, adapter or version does not exist, or the adapter has no published version.
            StateError: The samplers cannot use the adapter's weights.
            RetryableError: The version did not arrive within `wait`, or the samplers stayed unavailable.
        """
        params = convert.sampling_params(sampling_params, num_samples=num_samples)
        ref = self._adapter(adapter_name, adapter)
        prompts = _prompts(inputs)
        pending = {
            index: convert.prompt_to_proto(prompt, is_thinking_enabled=self._is_thinking_enabled)
            for index, prompt in enumerate(prompts)
        }
        done: dict[int, SampleResponse] = {}
        failures = 0
        while pending:
            before = len(pending)
            try:
                async for index, response in self._sample_batch(pending, params, ref):
                    done[index] = sample_response(response, prompt=prompts[index])
                pending = {index: prompt for index, prompt in pending.items() if index not in done}
            except RetryableError:
                pending = {index: prompt for index, prompt in pending.items() if index not in done}
                failures = failures + 1 if len(pending) == before else 0
                if failures == MAX_FAILURES:
                    raise
        return SampleResults(done[index] for index in range(len(prompts)))

    @remote_stream
    async def sample_stream(
        self,
        prompt: Any,
        sampling_params: Params = None,
        adapter_name: str = '',
        *,
        num_samples: int | None = None,
        **adapter: Any,
    ) -> AsyncIterator[SampleDelta]:
        """Complete one prompt, yielding tokens as they are generated; leaving the loop cancels the request.

        The arguments and the errors are the same as for `sample`, with one prompt.
        """
        request = sampler_service_pb2.SampleRequest(
            request_id=new_id('sm'),
            base_model=self.model_id,
            adapter=self._adapter(adapter_name, adapter),
            prompt=convert.prompt_to_proto(prompt, is_thinking_enabled=self._is_thinking_enabled),
            params=convert.sampling_params(sampling_params, num_samples=num_samples),
        )
        async with aclosing(self._connection.stream(self._stub.Sample, request, service='sampler')) as responses:
            async for response in responses:
                if response.HasField('delta'):
                    yield delta_from_proto(response.delta)
                elif response.HasField('finished'):
                    yield end_from_proto(response.finished)

    @remote_method
    async def compute_logprobs(
        self, inputs: Any, adapter_name: str = '', **adapter: Any
    ) -> list[npt.NDArray[np.float32]]:
        """Return the log-probability of each token of the given sequences.

        Args:
            inputs: One or more features or sequences of token ids.
            adapter_name: See the class.
            adapter: See `sample`.

        Returns:
            One float32 [T] array per sequence, natural log; the first element is NaN.

        Raises:
            ValueError: An input is a string or a chat.
            TypeError, NotFoundError, StateError, RetryableError: See `sample`.
        """
        prompts = [convert.prompt_to_proto(prompt) for prompt in _prompts(inputs)]
        if not all(prompt.HasField('token_ids') for prompt in prompts):
            raise ValueError('inputs must be features or token ids')
        request = sampler_service_pb2.ComputeLogprobsRequest(
            base_model=self.model_id,
            adapter=self._adapter(adapter_name, adapter),
            token_ids=[prompt.token_ids for prompt in prompts],
        )
        response = await self._connection.unary(self._stub.ComputeLogprobs, request)
        return [cast(Any, convert.tensor_from_proto(sequence.logprobs)) for sequence in response.sequences]

    @remote_method
    async def load_adapter(self, adapter_name: str = '', **adapter: Any) -> int:
        """Load an adapter version before it is needed, and return the version.

        Only the sampler that the adapter's requests reach first loads the version.

        Args:
            adapter_name: See the class.
            adapter: See `sample`.

        Raises:
            NotFoundError: The adapter or version does not exist, or the adapter has no published version.
            RetryableError: The version was not loaded within `wait`.
            StateError: The weights do not fit the model, or belong to a full-parameter run that the sampler is not
                configured to follow.
        """
        request = sampler_service_pb2.LoadAdapterRequest(adapter=self._adapter(adapter_name, adapter))
        return (await self._connection.unary(self._stub.LoadAdapter, request)).adapter.version

    def note_synced(self, adapter_id: str, version: int) -> None:
        """Use this version for requests without an adapter. An earlier version of the adapter is no longer used."""
        self._synced[adapter_id] = version

    @remote_method
    async def reset_prefix_cache(self) -> int:
        """Clear the prefix caches of all samplers of the server; return the number of tokens that were dropped.

        Raises:
            AccessError: The API key lacks the scope 'operator'.
        """
        request = sampler_service_pb2.ResetPrefixCacheRequest()
        return (await self._connection.unary(self._stub.ResetPrefixCache, request)).dropped_token_count

    def _adapter(self, adapter_name: str, adapter: Mapping[str, Any]) -> sampling_pb2.AdapterRef | None:
        unknown = sorted(set(adapter) - {'adapter_uri', 'version', 'min_version', 'wait', 'use_base_model'})
        if unknown:
            raise TypeError(f'unknown arguments {unknown}; see the class documentation of Sampler')
        uri = adapter.get('adapter_uri') or ''
        if uri and adapter_name:
            raise ValueError('adapter_name and adapter_uri cannot be combined; pass one of them')
        if adapter.get('use_base_model'):
            if uri or adapter_name:
                raise ValueError('use_base_model cannot be combined with an adapter; pass one of them')
        elif self._synced and not (uri or adapter_name):
            return self._synced_adapter(adapter)
        names = self._client.adapter_names
        return convert.adapter_ref(
            uri or names.find(adapter_name, base_model=self.model_id, preferred=self._synced),
            version=adapter.get('version'),
            min_version=adapter.get('min_version'),
            wait=adapter.get('wait'),
        )

    def _synced_adapter(self, adapter: Mapping[str, Any]) -> sampling_pb2.AdapterRef | None:
        """Return the synced adapter, with the requested version or else the synced version."""
        if len(self._synced) > 1:
            raise ValueError(f'several adapters were synced, {list(self._synced)}; choose one with adapter_name=')
        ((adapter_id, synced),) = self._synced.items()
        min_version = adapter.get('min_version')
        version = adapter.get('version') or (synced if min_version is None else None)
        return convert.adapter_ref(adapter_id, version=version, min_version=min_version, wait=adapter.get('wait'))

    async def _sample_batch(
        self,
        pending: Mapping[int, sampling_pb2.Prompt],
        params: sampling_pb2.SamplingParams,
        ref: sampling_pb2.AdapterRef | None,
    ) -> AsyncIterator[tuple[int, sampler_service_pb2.SampleBatchResponse]]:
        """Yield the index and the response of each prompt as it finishes."""
        indexes = list(pending)
        request = sampler_service_pb2.SampleBatchRequest(
            request_id=new_id('sm'),
            base_model=self.model_id,
            adapter=ref,
            prompts=list(pending.values()),
            params=params,
        )
        async with aclosing(self._connection.stream(self._stub.SampleBatch, request, service='sampler')) as responses:
            async for response in responses:
                yield indexes[response.prompt_index], response


vLLMSampler = Sampler  # noqa: N816 - the name users type
"""Alias with the library's name. The server chooses the engine."""


def _prompts(inputs: Any) -> list[Any]:
    if isinstance(inputs, str | Mapping | np.ndarray):
        return [cast(Any, inputs)]
    prompts = list(inputs)
    if prompts and isinstance(prompts[0], int | np.integer):
        return [prompts]
    if not prompts:
        raise ValueError('inputs: at least one prompt is required')
    return prompts
