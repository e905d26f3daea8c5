"""What every sampler offers, whatever engine is behind it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

from twinkle.data_format import InputFeature, LoraConfig, SampleResponse, SamplingParams, Trajectory
from twinkle.template import Template

SamplerInput = Trajectory | InputFeature | Sequence[int]
"""A chat, a tokenised prompt, or token ids."""


class Sampler(ABC):
    """Continues prompts with a base model and its adapters."""

    @abstractmethod
    def sample(
        self,
        inputs: SamplerInput | Sequence[SamplerInput],
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        adapter_name: str = '',
        *,
        num_samples: int | None = None,
    ) -> list[SampleResponse]:
        """Return the completions of each input, in order.

        Args:
            inputs: one or many. A chat is opened for the assistant by the template first.
            sampling_params: for all of them. Unset: the defaults of `SamplingParams`.
            adapter_name: an adapter that was added. Empty: the base model alone.
            num_samples: completions of each input, in place of `sampling_params.num_samples`.

        Raises:
            UnknownAdapter: no adapter of that name was added.
            ContextExceeded, InvalidPrompt, InvalidSamplingParams: nothing was sampled.
            ValueError: a chat or parameter is malformed.
        """

    @abstractmethod
    def set_template(self, template_cls: str | type[Template] | Template, **options: Any) -> None:
        """Choose how chats become tokens; `options` are those of the template."""

    @abstractmethod
    def add_adapter_to_sampler(self, adapter_name: str, config_or_dir: 'LoraConfig | str | PathLike[str]') -> None:
        """Add an adapter, or replace it by a newer version.

        Args:
            adapter_name: how `sample` names it.
            config_or_dir: a peft folder, or a configuration for fresh weights, which change nothing yet.
        """

    @abstractmethod
    def reset_prefix_cache(self) -> None:
        """Make sure that nothing computed for earlier requests is used for later ones."""

    @abstractmethod
    def encode_trajectory(self, trajectory: Trajectory, *, add_generation_prompt: bool = True) -> InputFeature:
        """Return a chat as tokens, by the template."""

    @abstractmethod
    def decode_response(self, token_ids: Sequence[int]) -> str:
        """Return new tokens as text, special tokens left out."""
