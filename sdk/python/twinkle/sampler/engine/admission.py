"""Checks of a request before any work is done."""

from collections.abc import Sequence
from dataclasses import dataclass

from twinkle.data_format import InvalidProbe, PromptProbe, SamplingParams
from twinkle.sampler.errors import ContextExceeded, InvalidPrompt, InvalidSamplingParams, NotSupportedByEngine


@dataclass(frozen=True, kw_only=True)
class Admission:
    """Limits of an engine, against which every request is checked."""

    vocab_size: int
    context_tokens: int
    """Maximum number of tokens of one sequence, including its prompt."""
    is_text_known: bool
    """Whether the engine can convert tokens to text."""
    is_routing_known: bool = False
    """Whether the engine can report the experts of tokens."""

    def check(self, prompt: Sequence[int], params: SamplingParams) -> int:
        """Check a request and return the maximum number of new tokens per sequence.

        Raises:
            InvalidPrompt: the prompt is empty or contains a token outside the vocabulary.
            ContextExceeded: prompt and new tokens exceed the context length.
            InvalidSamplingParams: a parameter is not valid for this engine.
            NotSupportedByEngine: `structured_output` is set. The vLLM engine checks it separately, and omits it here.
        """
        if params.structured_output is not None:
            raise NotSupportedByEngine('structured_output')
        self._check_prompt(prompt)
        available_tokens = self.context_tokens - len(prompt)
        needed = 1 if params.max_tokens is None else params.max_tokens
        if needed > available_tokens:
            raise ContextExceeded(prompt_tokens=len(prompt), max_tokens=needed, context_tokens=self.context_tokens)
        max_new_tokens = available_tokens if params.max_tokens is None else needed
        self._check_params(params, max_new_tokens)
        if params.prompt_probe is not None:
            self._check_probe(params.prompt_probe, len(prompt))
        return max_new_tokens

    def _check_probe(self, probe: PromptProbe, prompt_tokens: int) -> None:
        try:
            probe.check(prompt_tokens, self.vocab_size)
        except InvalidProbe as error:
            raise InvalidSamplingParams(error.field, error.problem) from error

    def _check_prompt(self, prompt: Sequence[int]) -> None:
        if not prompt:
            raise InvalidPrompt('the prompt is empty; pass at least one token')
        for position, token_id in enumerate(prompt):
            if not 0 <= token_id < self.vocab_size:
                raise InvalidPrompt(f'prompt token {position} must be from 0 to {self.vocab_size - 1}, got {token_id}')

    def _check_params(self, params: SamplingParams, max_new_tokens: int) -> None:
        if params.min_tokens > max_new_tokens:
            raise InvalidSamplingParams(
                'min_tokens', f'must be at most {max_new_tokens}, the limit on new tokens, got {params.min_tokens}'
            )
        if params.return_routed_experts and not self.is_routing_known:
            problem = 'only the torch engine supports it, for experts with softmax routers; leave it out'
            raise InvalidSamplingParams('return_routed_experts', problem)
        if params.stop_strings and not self.is_text_known:
            raise InvalidSamplingParams('stop', 'this engine has no tokenizer; use stop token ids instead of strings')
        if '' in params.stop_strings:
            raise InvalidSamplingParams('stop', 'stop strings must not be empty')
        for token_id in params.stop_token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise InvalidSamplingParams(
                    'stop', f'token ids must be from 0 to {self.vocab_size - 1}, got {token_id}'
                )
