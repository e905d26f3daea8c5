"""What the application needs of the world: an engine that samples and a source of weights."""

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from services.kit.caller import Caller
from services.sampler.domain.adapter import AdapterWeights, CheckpointFacts, VersionKey
from services.sampler.domain.fleet import ReplicaReport, Welcome, Wish
from services.sampler.domain.generation import (
    EngineFacts,
    EngineLoad,
    GenerationEvent,
    GenerationRequest,
    Prompt,
    SleepLevel,
    TokenForm,
)
from twinkle.data_format import StructuredOutput


class SamplerEngine(Protocol):
    """Continues prompts, each with its own adapter version. Every implementation passes one suite."""

    @property
    def facts(self) -> EngineFacts:
        """What does not change while the engine lives."""
        ...

    @property
    def load(self) -> EngineLoad:
        """How busy the engine is now."""
        ...

    async def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the prompt as tokens; a chat goes through the model's own template.

        Raises:
            InvalidField: the chat or text cannot be turned into tokens, or a token is outside the
                vocabulary; the path begins within the prompt: 'token_ids', 'text' or 'chat'.
            ContextExceeded: a chat is longer than the context.
        """
        ...

    async def describe_tokens(self, token_ids: tuple[int, ...]) -> tuple[TokenForm, ...]:
        """Return what tokens stand for, in order.

        Raises:
            InvalidField: 'token_ids': one is outside the vocabulary.
        """
        ...

    async def load_adapter(self, key: VersionKey, weights: AdapterWeights) -> None:
        """Make a version usable. Running requests go on meanwhile.

        Raises:
            AdapterMisfit: the weights do not fit the base model; nothing changed.
        """
        ...

    async def unload_adapter(self, key: VersionKey) -> None:
        """Forget a version that no request uses. Unknown versions are no error."""
        ...

    async def replace_base(self, weights: AdapterWeights) -> None:
        """Put a whole model in the place of the base model's weights; adapters stay, cached prefixes are forgotten.

        Tokens that are drawn without an adapter carry the version of `weights` from now on. Once begun it is
        finished, whatever becomes of the caller.

        Raises:
            AdapterMisfit: it is not the whole of this model; the old weights go on serving.
            EngineInUse: requests run, or the engine sleeps; nothing was done.
        """
        ...

    async def check_form(self, form: StructuredOutput, tenant_id: str) -> None:
        """Find out whether outputs can have a form, at a bounded cost. Tenants take turns.

        An engine that holds no forms says so in `generate`.

        Raises:
            InvalidField: they cannot, or finding out costs too much; 'params.structured_output'.
        """
        ...

    def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """Run a request and yield what it brings: the prompt once, tokens, one end for each sequence.

        Closing the generator ends the request and frees its memory at once. A reader that is slow
        holds nothing back but, at most, its own request; what waits for it is bounded by the request's own
        tokens.

        Raises:
            ContextExceeded: prompt and new tokens do not fit; nothing was done.
            InvalidField: a parameter cannot be honoured, by its path from the request.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a request: its sequences end with `StopReason.ABORT`. Unknown requests are no error."""
        ...

    async def reset_prefix_cache(self) -> int:
        """Forget cached prefixes of ended requests and return how many tokens they had."""
        ...

    async def pause(self) -> None:
        """Stop between two steps; requests wait and keep their memory."""
        ...

    async def resume(self) -> None:
        """Go on."""
        ...

    async def sleep(self, level: SleepLevel) -> None:
        """Give back the accelerator's memory; no request runs, and cached prefixes are forgotten.

        Raises:
            NotSupportedHere: engine or platform cannot.
        """
        ...

    async def wake_up(self) -> None:
        """Take the memory again. An engine that does not sleep is no error."""
        ...

    async def wait_until_failed(self) -> None:
        """Return once the engine is broken for good, so that its process has to be replaced; else never."""
        ...

    async def close(self) -> None:
        """End every request and give back threads and memory."""
        ...


@dataclass(frozen=True)
class Synced:
    """The follower has everything there is for now."""


WeightUpdate = AdapterWeights | Synced


class WeightSource(Protocol):
    """Where versions of adapters come from. Weights are whole and verified when they are given out."""

    def follow(
        self, caller: Caller, adapter_id: str, held: AdapterWeights | None
    ) -> AsyncGenerator['AdapterWeights | Synced', None]:
        """Yield the newest version after `held`, then `Synced`, then each later version it can keep up with.

        Broken streams are resumed where they broke, for ever. What is held may make the next one cheaper to send.

        Raises:
            NotFound: nothing of that name was ever published for this tenant.
        """
        ...

    async def fetch(self, caller: Caller, adapter_id: str, version: int) -> AdapterWeights:
        """Return one version.

        Raises:
            NotFound: no such adapter, or the version has left the ring.
            Unavailable: the source cannot be reached.
        """
        ...

    async def find_checkpoint(self, caller: Caller, path: str) -> CheckpointFacts:
        """Return what a durable checkpoint is now.

        Raises:
            NotFound: no such checkpoint for this tenant.
            Unavailable: the source cannot be reached.
        """
        ...

    async def fetch_checkpoint(self, caller: Caller, path: str) -> AdapterWeights:
        """Return a durable checkpoint's weights; their version is 0.

        Raises:
            NotFound: no such checkpoint for this tenant.
            Unavailable: the source cannot be reached.
        """
        ...


class FleetGateway(Protocol):
    """A gateway that this sampler may be a member of."""

    @property
    def address(self) -> str:
        """Where it is, for logs."""
        ...

    async def register(self, report: ReplicaReport) -> Welcome:
        """Join its fleet. Idempotency: joining again is harmless.

        Raises:
            DomainError: it is away, or does not take this sampler.
        """
        ...

    def lease(self, reports: AsyncIterator[ReplicaReport]) -> AsyncGenerator[Wish, None]:
        """Send reports as they come and yield what the gateway wants, once for each.

        Once it has ended, or was closed, nothing waits in `reports` any more.

        Raises:
            DomainError: the lease has ended.
        """
        ...
