"""The sampler handle. Names of the library; what samples is whatever engine the server runs."""

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
    """A base model that can be sampled, with or without one of the caller's adapters.

    Verbs take the weights to use as `adapter_name` (a name given to `add_adapter_to_model`, or an
    adapter's id; with `version` or `min_version` to be exact) or `adapter_uri` (a checkpoint's path). A name that
    several model handles gave to different adapters is refused, unless exactly one of them was synced here.
    Neither: the version that `CheckpointEngineManager.sync_weights` synced last, the base model where it
    synced none or `use_base_model` is true. The server never answers with other weights than those asked for.
    """

    def __init__(self, model_id: str, *, client: TwinkleClient | None = None) -> None:
        """Name the model; nothing is sent.

        Args:
            model_id: the base model, as the server's info names it.
            client: where. Unset: the client that was initialised last.

        Raises:
            RuntimeError: there is no client.
        """
        self.model_id = model_id
        self._client = current_client(client)
        self._connection = self._client.connection
        self._stub = SamplerServiceStub(self._connection.channel)
        self._is_thinking_enabled: bool | None = None
        self._synced: dict[str, int] = {}

    @property
    def loop_thread(self) -> LoopThread:
        """Where its coroutines run."""
        return self._connection.loop_thread

    def set_template(self, template_cls: Any = 'Template', *, model_id: str = '', enable_thinking: bool = True) -> None:
        """Say how chats become prompts: the sampler uses the model's own chat template.

        Args:
            template_cls: name or class; any but 'Template' is only noted in the log.
            model_id: must be the sampler's, where given.
            enable_thinking: whether the model may think before it answers.

        Raises:
            ValueError: the template of another model is asked for.
        """
        if model_id not in {'', self.model_id}:
            raise ValueError(f'model_id must be {self.model_id!r}, the model that is sampled, got {model_id!r}')
        if component_name(template_cls) != 'Template':
            _log.info('%s: the sampler uses the chat template of %s', component_name(template_cls), self.model_id)
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
            inputs: one or many of: chats, features, token ids, plain texts.
            sampling_params: parameters, or a mapping of them.
            adapter_name: see the class.
            num_samples: completions for each prompt; replaces that of the parameters.
            adapter: `adapter_uri`, `version`, `min_version`, `wait`, `use_base_model`; see the class.

        Returns:
            One response a prompt, in order.

        Raises:
            ValueError: something cannot be sent.
            NotFoundError: there is no such model, adapter or version.
            StateError: the adapter has no version yet.
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
        """Complete one prompt, yielding tokens as they are drawn; leaving the loop frees the sequences.

        Arguments as for `sample`, with one prompt.
        """
        request = sampler_service_pb2.SampleRequest(
            request_id=new_id('sm'),
            base_model=self.model_id,
            adapter=self._adapter(adapter_name, adapter),
            prompt=convert.prompt_to_proto(prompt, is_thinking_enabled=self._is_thinking_enabled),
            params=convert.sampling_params(sampling_params, num_samples=num_samples),
        )
        async with aclosing(self._connection.stream(self._stub.Sample, request)) as responses:
            async for response in responses:
                if response.HasField('delta'):
                    yield delta_from_proto(response.delta)
                elif response.HasField('finished'):
                    yield end_from_proto(response.finished)

    @remote_method
    async def compute_logprobs(
        self, inputs: Any, adapter_name: str = '', **adapter: Any
    ) -> list[npt.NDArray[np.float32]]:
        """Return the log-probability of each token of given sequences, without sampling.

        Args:
            inputs: features or token ids, one or many.
            adapter_name: see the class.
            adapter: as for `sample`.

        Returns:
            float32 [T] each, natural; the first is NaN.
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
        """Have the sampler bring a version before it is needed; return the version that is there now.

        Args:
            adapter_name: see the class.
            adapter: as for `sample`.

        Raises:
            NotFoundError: there is no such adapter or version.
            RetryableError: it did not come within `wait`.
            StateError: its weights do not fit, or are those of a whole model, which this sampler does not follow.
        """
        request = sampler_service_pb2.LoadAdapterRequest(adapter=self._adapter(adapter_name, adapter))
        return (await self._connection.unary(self._stub.LoadAdapter, request)).adapter.version

    def note_synced(self, adapter_id: str, version: int) -> None:
        """Take this version for what a request without a name means; a newer one replaces it."""
        self._synced[adapter_id] = version

    @remote_method
    async def reset_prefix_cache(self) -> int:
        """Empty the engine's prefix cache; return the tokens that were in it."""
        request = sampler_service_pb2.ResetPrefixCacheRequest()
        return (await self._connection.unary(self._stub.ResetPrefixCache, request)).dropped_token_count

    def _adapter(self, adapter_name: str, adapter: Mapping[str, Any]) -> sampling_pb2.AdapterRef | None:
        unknown = sorted(set(adapter) - {'adapter_uri', 'version', 'min_version', 'wait', 'use_base_model'})
        if unknown:
            raise TypeError(f'unknown arguments {unknown}')
        uri = adapter.get('adapter_uri') or ''
        if uri and adapter_name:
            raise ValueError('give adapter_name or adapter_uri, not both')
        if adapter.get('use_base_model'):
            if uri or adapter_name:
                raise ValueError('use_base_model and an adapter cannot both be meant')
        elif self._synced and not (uri or adapter_name):
            return self._synced_adapter(adapter)
        names = self._client.adapter_names
        return convert.adapter_ref(
            uri or names.find(adapter_name, base_model=self.model_id, favoured=self._synced),
            version=adapter.get('version'),
            min_version=adapter.get('min_version'),
            wait=adapter.get('wait'),
        )

    def _synced_adapter(self, adapter: Mapping[str, Any]) -> sampling_pb2.AdapterRef | None:
        """Return the version that was synced; a version that is asked for wins."""
        if len(self._synced) > 1:
            raise ValueError(f'the adapters {list(self._synced)} were synced; say which with adapter_name=')
        ((adapter_id, synced),) = self._synced.items()
        least = adapter.get('min_version')
        version = adapter.get('version') or (synced if least is None else None)
        return convert.adapter_ref(adapter_id, version=version, min_version=least, wait=adapter.get('wait'))

    async def _sample_batch(
        self,
        pending: Mapping[int, sampling_pb2.Prompt],
        params: sampling_pb2.SamplingParams,
        ref: sampling_pb2.AdapterRef | None,
    ) -> AsyncIterator[tuple[int, sampler_service_pb2.SampleBatchResponse]]:
        """Yield finished prompts by their index among all."""
        indexes = list(pending)
        request = sampler_service_pb2.SampleBatchRequest(
            request_id=new_id('sm'),
            base_model=self.model_id,
            adapter=ref,
            prompts=list(pending.values()),
            params=params,
        )
        async with aclosing(self._connection.stream(self._stub.SampleBatch, request)) as responses:
            async for response in responses:
                yield indexes[response.prompt_index], response


vLLMSampler = Sampler  # noqa: N816 - the name users type
"""The name users know; which engine samples is the server's choice."""


def _prompts(inputs: Any) -> list[Any]:
    if isinstance(inputs, str | Mapping | np.ndarray):
        return [cast(Any, inputs)]
    prompts = list(inputs)
    if prompts and isinstance(prompts[0], int | np.integer):
        return [prompts]
    if not prompts:
        raise ValueError('inputs: at least one prompt is needed')
    return prompts
