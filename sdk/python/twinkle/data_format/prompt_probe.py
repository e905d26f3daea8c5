"""Values to compute for a prompt in addition to the log-probabilities of its tokens.

Legend: T tokens of the prompt, K target tokens per position, D hidden size of the model.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from twinkle.errors import error_class

MAX_TARGETS = 128
"""Maximum number of target tokens at one position."""
MAX_TARGET_ELEMENTS = 1 << 20
"""Maximum number of elements of the target tokens of one prompt."""
MAX_DRAWS = 128
"""Maximum number of tokens drawn at one position."""
MAX_PROMPT_DRAWS = 1 << 16
"""Maximum number of tokens drawn for one prompt."""
NO_TARGET = -1
"""Element of the target tokens that requests nothing."""
_TARGETS = 'prompt_probe.target_token_ids'


@error_class('{field} {problem}')
class InvalidProbe(ValueError):
    """A probe is malformed, or does not fit its prompt or the model."""

    field: str
    problem: str


@dataclass(frozen=True, eq=False, kw_only=True)
class PromptProbe:
    """Values to compute for a prompt. Row i of a matrix belongs to position i + 1."""

    target_token_ids: npt.NDArray[np.signedinteger[Any]] | None = None
    """[T - 1, K]: tokens whose log-probabilities are returned; -1 requests nothing. None: no log-probabilities."""
    draw_count: int = 0
    """Number of tokens to draw at each position, independently and with replacement. Only the temperature and the seed
    of the request affect them, not its filters and penalties."""
    is_embedding_returned: bool = False
    """Whether to return the hidden state of the prompt's last token, which `InfonceLoss` trains."""

    def __post_init__(self) -> None:
        """Validate the values.

        Raises:
            InvalidProbe: a value is out of range.
        """
        if not 0 <= self.draw_count <= MAX_DRAWS:
            raise InvalidProbe('prompt_probe.draw_count', f'must be 0 to {MAX_DRAWS}, got {self.draw_count}')
        if self.target_token_ids is None:
            return
        shape, dtype = self.target_token_ids.shape, self.target_token_ids.dtype
        if dtype.kind != 'i' or len(shape) != 2 or not 1 <= shape[1] <= MAX_TARGETS:
            wanted = f'must be an integer matrix with 1 to {MAX_TARGETS} columns'
            raise InvalidProbe(_TARGETS, f'{wanted}, got {dtype} {list(shape)}')
        if self.target_token_ids.size > MAX_TARGET_ELEMENTS:
            size = self.target_token_ids.size
            raise InvalidProbe(_TARGETS, f'must have at most {MAX_TARGET_ELEMENTS} elements, got {size}')

    def check(self, prompt_tokens: int, vocabulary_size: int) -> None:
        """Check that the probe fits a prompt and a model.

        Raises:
            InvalidProbe: the matrix has a wrong number of rows or an unknown token, or too many tokens are drawn.
        """
        rows, targets = prompt_tokens - 1, self.target_token_ids
        if rows * self.draw_count > MAX_PROMPT_DRAWS:
            problem = f'must be at most {MAX_PROMPT_DRAWS // rows} for a prompt of {prompt_tokens} tokens'
            raise InvalidProbe('prompt_probe.draw_count', f'{problem}, got {self.draw_count}')
        if targets is None:
            return
        if len(targets) != rows:
            raise InvalidProbe(
                _TARGETS, f'must have {rows} rows, one for each prompt token but the first, got {len(targets)}'
            )
        wrong = targets[(targets < NO_TARGET) | (targets >= vocabulary_size)]
        if wrong.size:
            raise InvalidProbe(_TARGETS, f'must be tokens from 0 to {vocabulary_size - 1}, or -1, got {wrong[0]}')


@dataclass(frozen=True, eq=False, kw_only=True)
class ProbeResult:
    """Results of a `PromptProbe`; None for a value that was not requested."""

    target_logprobs: npt.NDArray[np.float32] | None = None
    """Natural log-probabilities of the target tokens, [T - 1, K]; NaN where no token was requested."""
    drawn_token_ids: npt.NDArray[np.int32] | None = None
    """Drawn tokens, [T - 1, draw_count]."""
    drawn_logprobs: npt.NDArray[np.float32] | None = None
    """Natural log-probabilities of the drawn tokens before temperature, [T - 1, draw_count]."""
    embedding: npt.NDArray[np.float32] | None = None
    """Hidden state of the last token after the last layer's normalization, [D]; not scaled to unit length."""

    @classmethod
    def empty(cls, probe: PromptProbe, rows: int) -> 'ProbeResult':
        """Return a result for `rows` positions, to be filled in: the log-probabilities are NaN."""
        targets, shape = probe.target_token_ids, (rows, probe.draw_count)
        return cls(
            target_logprobs=None if targets is None else np.full(targets.shape, np.nan, np.float32),
            drawn_token_ids=np.zeros(shape, np.int32) if probe.draw_count else None,
            drawn_logprobs=np.full(shape, np.nan, np.float32) if probe.draw_count else None,
        )
