"""The scores of one prompt, collected from the logits of its rows, and its embedding.

Legend: V vocabulary size, R number of rows, D hidden size.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from twinkle.data_format import ProbeResult, PromptProbe
from twinkle.nn import log_probabilities
from twinkle.sampler.engine.request import EngineRequest, PromptEvent, TopTokens
from twinkle.sampler.engine.token_sampling import draw_tokens, most_likely, uniform


class PromptScores:
    """Collects the scores of a prompt that its request needs. Row i of a prompt predicts token i + 1.

    Args:
        request: the request.
        seed: seed of the drawn tokens.
    """

    def __init__(self, request: EngineRequest, *, seed: int) -> None:
        params = request.params
        self._request = request
        self._seed = seed
        self._top_count = params.prompt_logprobs
        self._probe = params.prompt_probe or PromptProbe()
        self._result = ProbeResult.empty(self._probe, len(request.prompt_token_ids) - 1)
        self._logprobs: list[float | None] = [None]
        self._top: list[TopTokens | None] = [None]

    @property
    def event(self) -> PromptEvent:
        """The event that reports the scores, once all rows are recorded."""
        return PromptEvent(
            request_id=self._request.request_id,
            logprobs=None if self._top_count is None else self._logprobs,
            top_logprobs=self._top if self._top_count else None,
            probe=self._result if self._request.params.prompt_probe else None,
            version=self._request.version,
        )

    def rows_among(self, begin: int, end: int) -> list[int]:
        """Return the rows from `begin` to `end` whose logits are needed. The last row of a prompt predicts no token."""
        rows = range(begin, min(end, len(self._request.prompt_token_ids) - 1))
        if self._top_count is not None or self._probe.draw_count:
            return list(rows)
        targets = self._probe.target_token_ids
        return [] if targets is None else [row for row in rows if (targets[row] >= 0).any()]

    def record(self, rows: Sequence[int], logits_RV: Tensor) -> None:
        """Record the scores of rows, which must be recorded in order."""
        for row, logits_V, logprobs_V in zip(rows, logits_RV, log_probabilities(logits_RV), strict=True):
            if self._top_count is not None:
                self._logprobs.append(float(logprobs_V[self._request.prompt_token_ids[row + 1]]))
                self._top.append(most_likely(logprobs_V, self._top_count))
            self._record_targets(row, logprobs_V)
            self._record_draws(row, logits_V, logprobs_V)

    def record_last(self, hidden_D: Tensor) -> None:
        """Record the hidden state of the prompt's last token if the request needs the embedding."""
        if self._probe.is_embedding_returned:
            self._result = replace(self._result, embedding=hidden_D.float().cpu().numpy().copy())

    def _record_targets(self, row: int, logprobs_V: Tensor) -> None:
        targets, found = self._probe.target_token_ids, self._result.target_logprobs
        if targets is None or found is None:
            return
        is_target = targets[row] >= 0
        token_ids = torch.from_numpy(targets[row][is_target].astype(np.int64))
        found[row, is_target] = logprobs_V[token_ids.to(logprobs_V.device)].cpu().numpy()

    def _record_draws(self, row: int, logits_V: Tensor, logprobs_V: Tensor) -> None:
        token_ids, logprobs = self._result.drawn_token_ids, self._result.drawn_logprobs
        if token_ids is None or logprobs is None:
            return
        # Negative indices differ from the indices of all sequences, so drawn and sampled tokens are independent.
        numbers = [uniform(self._seed, -1 - index, row) for index in range(self._probe.draw_count)]
        drawn = draw_tokens(logits_V, self._request.params.temperature, numbers)
        token_ids[row] = drawn.cpu().numpy()
        logprobs[row] = logprobs_V[drawn].cpu().numpy()
