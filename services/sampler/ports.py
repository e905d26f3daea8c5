"""Ports of the sampler: an engine that samples, a source of weights, and the gateways of the fleet."""

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from twinkle.data_format import StructuredOutput
from twinkle_services.kit.caller import Caller
from twinkle_services.sampler.domain.adapter import AdapterWeights, CheckpointFacts, VersionKey
from twinkle_services.sampler.domain.fleet import LeaseRenewal, Registration, ReplicaReport
from twinkle_services.sampler.domain.generation import (
    EngineFacts,
    EngineLoad,
    GenerationEvent,
    GenerationRequest,
    Prompt,
    SleepLevel,
    TokenForm,
)


class SamplerEngine(Protocol):
    """Runs prompts, each with its adapter version. Every implementation passes tests/contract/sampler.

    A call that needs the engine raises EngineFailed if the engine has failed or was closed.
    """

    @property
    def facts(self) -> EngineFacts:
        """Properties that do not change during the engine's lifetime."""
        ...

    @property
    def load(self) -> EngineLoad:
        """Current load of the engine."""
        ...

    @property
    def device_memory(self) -> Mapping[str, int]:
        """Bytes of the GPUs' memory by state, at most some seconds old; empty on a CPU. Any thread may read it."""
        ...

    async def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the prompt's tokens; a chat is rendered with the model's chat template.

        Raises:
            InvalidField: The chat or text cannot be encoded, or a token is outside the vocabulary. The field path
                starts with 'token_ids', 'text' or 'chat'.
            ContextExceeded: A chat, or the minimum number of tokens of a text, exceeds the context.
        """
        ...

    async def describe_tokens(self, token_ids: tuple[int, ...]) -> tuple[TokenForm, ...]:
        """Return the description of each token, in order.

        Raises:
            InvalidField: A token is outside the vocabulary; the field is 'token_ids'.
        """
        ...

    async def load_adapter(self, key: VersionKey, weights: AdapterWeights) -> None:
        """Load a version while running requests continue.

        Raises:
            AdapterMisfit: The weights do not fit the base model; nothing changed.
        """
        ...

    async def unload_adapter(self, key: VersionKey) -> None:
        """Unload a version that no request uses; do nothing for an unknown version."""
        ...

    async def replace_base(self, weights: AdapterWeights) -> None:
        """Replace the base model's weights; adapters stay loaded, and cached prefixes are dropped.

        Afterwards, tokens sampled without an adapter are labelled with the version of `weights`. Once a replacement has
        begun, it is completed even if the call is cancelled.

        Raises:
            AdapterMisfit: The weights are not a complete set for this model; the old weights remain in use.
            EngineInUse: Requests are running, or the engine is sleeping; the old weights remain in use.
        """
        ...

    async def check_form(self, form: StructuredOutput, tenant_id: str) -> None:
        """Check that the engine can constrain outputs to `form`, within limits on the time and memory of the check.

        Tenants take turns, so that many checks of one tenant do not delay those of another. An engine without
        structured output does nothing here; its `generate` raises NotSupportedHere.

        Raises:
            InvalidField: The form is invalid, or its check exceeds a limit; the field is 'params.structured_output'.
            EngineFailed: The engine did not answer the check.
        """
        ...

    def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """Run a request and yield its events: the prompt once, then tokens, and one final event per sequence.

        Closing the generator stops the request and frees its memory immediately. A slow reader delays only its own
        request. The number of waiting events is limited by the request's number of tokens.

        Raises:
            ContextExceeded: Prompt and new tokens exceed the context; nothing was computed.
            InvalidField: A parameter is invalid for this engine; the field path is relative to the request.
            NotSupportedHere: The engine does not support a parameter, for example structured output.
            VersionNotFound: The request's adapter version is not loaded.
            AdapterMisfit: The weights compute log-probabilities that are NaN.
            EngineFailed: The engine failed while it ran the request.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """Abort a request; its sequences finish with `StopReason.ABORT`. Do nothing for an unknown request."""
        ...

    async def reset_prefix_cache(self) -> int:
        """Drop the cached prefixes of finished requests, and return their number of tokens, possibly an estimate."""
        ...

    async def pause(self) -> None:
        """Pause between two steps; requests wait and keep their memory."""
        ...

    async def resume(self) -> None:
        """Continue after a pause; do nothing if the engine is not paused."""
        ...

    async def sleep(self, level: SleepLevel) -> None:
        """Release the accelerator's memory and drop cached prefixes; the caller ensures that no request runs.

        Raises:
            NotSupportedHere: The engine cannot sleep on this platform, or does not support this level.
        """
        ...

    async def wake_up(self) -> None:
        """Allocate the memory again; do nothing if the engine does not sleep."""
        ...

    async def wait_until_failed(self) -> None:
        """Return once the engine has failed permanently and its process must be replaced; otherwise never return."""
        ...

    async def close(self) -> None:
        """Stop all requests, and release threads and memory."""
        ...


@dataclass(frozen=True)
class Synced:
    """Reports that the follower has the newest published version."""


WeightUpdate = AdapterWeights | Synced


class WeightSource(Protocol):
    """Source of versions and checkpoints. Returned weights are complete and verified.

    An error returned by another service is raised as a `ForwardedError` with the code of the class that a method names.
    """

    def follow(
        self, caller: Caller, adapter_id: str, held: AdapterWeights | None
    ) -> AsyncGenerator['AdapterWeights | Synced', None]:
        """Yield the newest version if it is newer than `held`, and then later versions as they are published.

        `Synced` is yielded when no newer version exists. A reader that is slower than the publisher skips versions.
        Broken streams are resumed indefinitely.

        Args:
            caller: Tenant that owns the adapter.
            adapter_id: Adapter to follow.
            held: Weights of this adapter that the caller already has, or None. The source may send only the difference
                from these weights to the next version.

        Raises:
            NotFound: The tenant has not published an adapter of that name.
        """
        ...

    async def fetch(self, caller: Caller, adapter_id: str, version: int) -> AdapterWeights:
        """Return one version.

        Raises:
            NotFound: The adapter does not exist, or its version has been evicted.
            DataLoss: The stored version is damaged.
            Unavailable: The source cannot be reached.
        """
        ...

    async def find_checkpoint(self, caller: Caller, path: str) -> CheckpointFacts:
        """Return the current content of a durable checkpoint.

        Raises:
            NotFound: The checkpoint does not exist, or the tenant may not read it.
            DataLoss: The checkpoint's record is damaged.
            Unavailable: The source cannot be reached.
        """
        ...

    async def fetch_checkpoint(self, caller: Caller, path: str) -> AdapterWeights:
        """Return a durable checkpoint's weights, with version 0.

        Raises:
            NotFound: The checkpoint does not exist, or the tenant may not read it.
            DataLoss: The stored checkpoint is damaged.
            Unavailable: The source cannot be reached.
        """
        ...


class FleetGateway(Protocol):
    """A gateway whose fleet this sampler may join."""

    @property
    def address(self) -> str:
        """Address of the gateway, for logs."""
        ...

    async def register(self, report: ReplicaReport) -> Registration:
        """Join the gateway's fleet. Idempotency: registering again is allowed.

        Raises:
            DomainError: The gateway cannot be reached, or refuses this sampler.
        """
        ...

    def lease(self, reports: AsyncIterator[ReplicaReport]) -> AsyncGenerator[LeaseRenewal, None]:
        """Send reports as they are produced, and yield the gateway's response to each.

        Once the generator has finished or been closed, no task waits for `reports` any more.

        Raises:
            DomainError: The lease was lost.
        """
        ...
