"""Encodes prompts with the model's tokenizer and chat template."""

import numpy as np

from twinkle.hub import resolve_tokenizer
from twinkle.template import ChatTokenizer, ExampleTooLong, InvalidTrajectory, Template, TemplateError
from twinkle_services.kit.errors import InvalidField
from twinkle_services.sampler.domain.errors import ContextExceeded
from twinkle_services.sampler.domain.generation import ChatPrompt, EngineFacts, Prompt, TokenForm, TokenPrompt


class PromptEncoder:
    """Encodes prompts for one model.

    Concurrency: threads may share an instance.
    """

    def __init__(self, folder: str, *, vocabulary_size: int) -> None:
        """Read the tokenizer of the model in `folder`; the chat template is read with the first chat."""
        self._folder = folder
        self._vocabulary_size = vocabulary_size
        self.tokenizer = ChatTokenizer(resolve_tokenizer(folder))
        self._templates: dict[tuple[bool, int], Template] = {}

    def encode(self, prompt: Prompt, facts: EngineFacts) -> tuple[int, ...]:
        """Return the prompt's tokens.

        Raises:
            InvalidField: The prompt cannot be encoded; the field path starts with 'token_ids', 'text' or 'chat'.
            ContextExceeded: A chat, or the minimum number of tokens of a text, exceeds the context. For a text,
                `prompt_tokens` is this minimum.
        """
        if isinstance(prompt, TokenPrompt):
            return self._checked(prompt.token_ids)
        if isinstance(prompt, ChatPrompt):
            return self._encode_chat(prompt, facts)
        lower_bound = self.tokenizer.min_token_count(prompt.text)
        if lower_bound > facts.context_tokens:
            raise ContextExceeded(lower_bound, 1, facts.context_tokens)
        token_ids = tuple(self.tokenizer.encode(prompt.text))
        if not token_ids:
            raise InvalidField('text', 'is empty; give at least one character')
        return token_ids

    def tool_call_format(self, context_tokens: int) -> str:
        """Return the name of the parser of the model's tool calls; empty if the chat template does not render tools."""
        try:
            template = self._template(context_tokens, is_thinking_enabled=True)
        except TemplateError:
            return ''
        return template.tool_call_parser.name if template.renders_tools else ''

    def describe(self, token_ids: tuple[int, ...]) -> tuple[TokenForm, ...]:
        """Return the description of each token, in order.

        Raises:
            InvalidField: A token is outside the vocabulary.
        """
        return tuple(
            TokenForm(piece=self.tokenizer.token_bytes(token_id), is_special=self.tokenizer.is_special(token_id))
            for token_id in self._checked(token_ids)
        )

    def _checked(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        array = np.asarray(token_ids)
        wrong = np.flatnonzero((array < 0) | (array >= self._vocabulary_size))
        if wrong.size:
            position = int(wrong[0])
            problem = f'token {position} is {token_ids[position]}; tokens are 0 to {self._vocabulary_size - 1}'
            raise InvalidField('token_ids', problem)
        return token_ids

    def _encode_chat(self, prompt: ChatPrompt, facts: EngineFacts) -> tuple[int, ...]:
        try:
            template = self._template(facts.context_tokens, is_thinking_enabled=prompt.is_thinking_enabled)
            feature = template.encode(prompt.trajectory, add_generation_prompt=True)
        except ExampleTooLong as error:
            raise ContextExceeded(error.token_count, 1, facts.context_tokens) from error
        except InvalidTrajectory as error:
            raise InvalidField(f'chat.trajectory.{error.field}', error.problem) from error
        except TemplateError as error:
            raise InvalidField('chat', str(error)) from error
        return tuple(int(token_id) for token_id in feature.get('input_ids', ()))

    def _template(self, max_length: int, *, is_thinking_enabled: bool) -> Template:
        key = (is_thinking_enabled, max_length)
        if key not in self._templates:
            self._templates[key] = Template(
                self._folder, max_length=max_length, enable_thinking=is_thinking_enabled, is_media_read=False
            )
        return self._templates[key]
