"""The interface of all samplers."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

from twinkle.checkpoint_engine import BaseSource, PackedState
from twinkle.data_format import InputFeature, LoraConfig, SampleResults, SamplingParams, Trajectory
from twinkle.template import Template, build_template

SamplerInput = Trajectory | InputFeature | Sequence[int]
"""A chat, a tokenized prompt, or token ids."""


class Sampler(ABC):
    """Samples completions of prompts with a base model and its adapters."""

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
            inputs: one input or several. The template adds the generation prompt to a chat.
            sampling_params: parameters of all inputs. None: the defaults of `SamplingParams`.
            adapter_name: an added adapter. Empty: the adapter received from a trainer (see `receive_weights`), or the
                base model if no adapter was received.
            num_samples: number of completions per input. None: `sampling_params.num_samples`.
            use_base_model: whether to sample from the base model even if an adapter was received.

        Raises:
            UnknownAdapter: no adapter of this name was added.
            ContextExceeded, InvalidPrompt, InvalidSamplingParams: an input or a parameter was refused.
            ValueError: `inputs` is empty, a chat or parameter is malformed or not supported, `adapter_name` is given
                with `use_base_model`, or several adapters were received and `adapter_name` is empty.
            EngineFailed: the vLLM engine failed, or could not check `structured_output`.
        """

    @property
    @abstractmethod
    def base_source(self) -> BaseSource:
        """Origin of the base weights."""

    @abstractmethod
    def receive_weights(self, state: PackedState, *, adapter_name: str = '') -> int:
        """Verify and load weights from memory. An error other than `EngineFailed` leaves the weights unchanged.

        An adapter's state becomes the newest version of `adapter_name`; running requests keep their version. The state
        of a model replaces the base weights and removes all adapters, because they belong to the previous base model.
        Results cached for earlier weights are not reused.

        Args:
            state: state of an adapter or a model; read-only, and not needed after the call.
            adapter_name: name of the adapter for `sample`; empty for the state of a model.

        Returns:
            The version number of these weights, counted from 1 for each adapter name and for the base model.

        Raises:
            DigestMismatch: the bytes do not match the manifest's digest.
            ValueError: the weights do not fit the model, or `adapter_name` does not match the kind of state.
            SamplerBusy: requests are running on the base weights that would be replaced.
            EngineFailed: the vLLM engine failed, and its weights are undefined.
        """

    @property
    def template(self) -> Template:
        """Chat template: the model's own, unless `set_template` was called."""
        if self._template is None:
            self._template = Template(self.model_id)
        return self._template

    def set_template(self, template_cls: str | type[Template] | Template, **options: Any) -> None:
        """Set the chat template.

        Args:
            template_cls: name, plugin id, class or instance of a template.
            options: options of the template; `model_id` defaults to the sampler's.

        Raises:
            UnknownTemplate: no template of this name exists.
            PluginRefused: plugins are not allowed, or the plugin does not contain exactly one template.
            TypeError: options are given with an instance, or the template does not accept them.
            HubError, TemplateError, ValueError: the template's constructor failed; see `Template`.
        """
        if not isinstance(template_cls, Template):
            options.setdefault('model_id', self.model_id)
        self._template = build_template(template_cls, **options)

    @abstractmethod
    def add_adapter_to_sampler(self, adapter_name: str, config_or_dir: 'LoraConfig | str | PathLike[str]') -> None:
        """Add an adapter, or replace it with a new version.

        Args:
            adapter_name: name of the adapter for `sample`.
            config_or_dir: a PEFT folder, or a configuration for newly initialized weights, which have no effect yet.

        Raises:
            ValueError: the name is empty, or the adapter does not fit the model.
            TypeError: the configuration has an unknown key or no rank.
            InvalidPeftFolder: the folder does not contain a supported adapter.
            EngineFailed: the vLLM engine failed.
        """

    @abstractmethod
    def reset_prefix_cache(self) -> None:
        """Discard cached prefixes, so that later requests reuse no results of earlier requests."""

    def encode_trajectory(self, trajectory: Trajectory, *, add_generation_prompt: bool = True) -> InputFeature:
        """Convert a chat to tokens with the template.

        Raises:
            InvalidTrajectory: the chat is malformed. The error names the field.
            TemplateError: the template cannot encode the chat, for example because the chat is too long.
        """
        return self.template.encode(trajectory, add_generation_prompt=add_generation_prompt)

    def decode_response(self, token_ids: Sequence[int]) -> str:
        """Convert sampled tokens to text, without special tokens."""
        return self.template.decode(token_ids, skip_special_tokens=True)
