"""What an engine refuses, before any work is done."""

from collections.abc import Sequence
from dataclasses import dataclass

from twinkle.data_format import SamplingParams
from twinkle.sampler.errors import ContextExceeded, InvalidPrompt, InvalidSamplingParams, NotSupportedByEngine


@dataclass(frozen=True, kw_only=True)
class Admission:
    """The bounds one engine holds every request to."""

    vocab_size: int
    context_tokens: int
    """Most tokens of one sequence, prompt and completion together."""
    is_text_known: bool
    """Whether the engine can turn tokens into text."""

    def check(self, prompt: Sequence[int], params: SamplingParams) -> int:
        """Return the most new tokens each sequence may have, or refuse.

        Raises:
            InvalidPrompt: the prompt is empty or has a token outside the vocabulary.
            ContextExceeded: prompt and new tokens do not fit the context.
            InvalidSamplingParams: a parameter cannot be honoured here.
            NotSupportedByEngine: a form of the output is asked for, which this engine cannot hold.
        """
        if params.structured_output is not None:
            raise NotSupportedByEngine('structured_output')
        self._check_prompt(prompt)
        room = self.context_tokens - len(prompt)
        least = 1 if params.max_tokens is None else params.max_tokens
        if least > room:
            raise ContextExceeded(prompt_tokens=len(prompt), max_tokens=least, context_tokens=self.context_tokens)
        max_new_tokens = room if params.max_tokens is None else least
        self._check_params(params, max_new_tokens)
        return max_new_tokens

    def _check_prompt(self, prompt: Sequence[int]) -> None:
        if not prompt:
            raise InvalidPrompt('the prompt is empty; give at least one token')
        for place, token_id in enumerate(prompt):
            if not 0 <= token_id < self.vocab_size:
                raise InvalidPrompt(f'prompt token {place} is {token_id}; tokens are 0 to {self.vocab_size - 1}')

    def _check_params(self, params: SamplingParams, max_new_tokens: int) -> None:
        if params.min_tokens > max_new_tokens:
            raise InvalidSamplingParams('min_tokens', f'{params.min_tokens} is above the {max_new_tokens} allowed')
        if params.stop_strings and not self.is_text_known:
            raise InvalidSamplingParams('stop', 'this engine has no tokenizer; give stop token ids')
        if '' in params.stop_strings:
            raise InvalidSamplingParams('stop', 'a stop string is empty')
        for token_id in params.stop_token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise InvalidSamplingParams('stop', f'token {token_id} is not in 0 to {self.vocab_size - 1}')
