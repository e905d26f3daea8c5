"""What every sampler offers, whatever engine is behind it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

from twinkle.checkpoint_engine import BaseSource, PackedState
from twinkle.data_format import InputFeature, LoraConfig, SampleResults, SamplingParams, Trajectory
from twinkle.template import Template, build_template

SamplerInput = Trajectory | InputFeature | Sequence[int]
"""A chat, a tokenised prompt, or token ids."""


class Sampler(ABC):
    """Continues prompts with a base model and its adapters."""

    model_id: str
    """Hub id or folder of the base model."""
    _template: Template | None = None

    @abstractmethod
    def sample(
        self,
        inputs: SamplerInput | Sequence[SamplerInput],
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        adapter_name: str = '',
        *,
        num_samples: int | None = None,
        use_base_model: bool = False,
    ) -> SampleResults:
        """Return the completions of each input, in order.

        Args:
            inputs: one or many. A chat is opened for the assistant by the template first.
            sampling_params: for all of them. Unset: the defaults of `SamplingParams`.
            adapter_name: an adapter that was added. Empty: the one that was received from a trainer, see
                `receive_weights`; the base model alone where none was.
            num_samples: completions of each input, in place of `sampling_params.num_samples`.
            use_base_model: sample the base model alone, also where an adapter was received.

        Raises:
            UnknownAdapter: no adapter of that name was added.
            ContextExceeded, InvalidPrompt, InvalidSamplingParams: nothing was sampled.
            ValueError: a chat or parameter is malformed, or several adapters were received and none is named.
        """

    @property
    @abstractmethod
    def base_source(self) -> BaseSource:
        """Where the base weights it samples with come from."""

    @abstractmethod
    def receive_weights(self, state: PackedState, *, adapter_name: str = '') -> int:
        """Take weights from memory, whole and verified or not at all.

        An adapter's state becomes the newest version of `adapter_name`; requests that run keep theirs. A
        model's own weights replace those of the base model, and every adapter is forgotten, as it was made
        for another one. Nothing cached from earlier weights is used for later requests.

        Args:
            state: an adapter's, or a model's; only read, and not needed afterwards.
            adapter_name: how `sample` names the adapter; empty for a model's own weights.

        Returns:
            The version that tokens drawn with these weights carry: counted from 1 for each name, and for the base.

        Raises:
            DigestMismatch: the bytes are others than the manifest says.
            ValueError: the weights do not fit the model, or name and state do not fit together.
            SamplerBusy: requests run on the base weights that are to be replaced.
        """

    @property
    def template(self) -> Template:
        """How chats become tokens; the model's own format unless `set_template` chose another."""
        if self._template is None:
            self._template = Template(self.model_id)
        return self._template

    def set_template(self, template_cls: str | type[Template] | Template, **options: Any) -> None:
        """Choose how chats become tokens.

        Args:
            template_cls: a name, class or instance.
            options: of the template; `model_id` is this sampler's unless given.

        Raises:
            UnknownTemplate: no template has that name.
        """
        if not isinstance(template_cls, Template):
            options.setdefault('model_id', self.model_id)
        self._template = build_template(template_cls, **options)

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

    def encode_trajectory(self, trajectory: Trajectory, *, add_generation_prompt: bool = True) -> InputFeature:
        """Return a chat as tokens, by the template.

        Raises:
            InvalidTrajectory: names the field that is wrong.
        """
        return self.template.encode(trajectory, add_generation_prompt=add_generation_prompt)

    def decode_response(self, token_ids: Sequence[int]) -> str:
        """Return new tokens as text, special tokens left out."""
        return self.template.decode(token_ids, skip_special_tokens=True)
