"""Assembly of a `SampleResponse` from the events of a request."""

from dataclasses import replace
from typing import Any, cast

import numpy as np

from twinkle.data_format import InputFeature, SampledSequence, SampleResponse, StopReason, extended_experts
from twinkle.sampler.engine import EngineEvent, PromptEvent
from twinkle.template import Template


class ResponseBuilder:
    """Collects the events of one request."""

    def __init__(self, prompt: InputFeature, num_samples: int) -> None:
        self._prompt = prompt
        self._prompt_event: PromptEvent | None = None
        self._sequences = [SampledSequence(stop_reason=StopReason.ERROR, tokens=[]) for _ in range(num_samples)]

    def add(self, event: EngineEvent) -> None:
        """Add one event."""
        if isinstance(event, PromptEvent):
            self._prompt_event = event
            return
        sequence = self._sequences[event.sequence_index]
        sequence.tokens.extend(event.tokens)
        sequence.logprobs.extend(event.logprobs)
        self._sequences[event.sequence_index] = replace(
            sequence,
            decoded=sequence.decoded + event.text,
            stop_reason=event.stop_reason or sequence.stop_reason,
            version_spans=event.version_spans or sequence.version_spans,
            routed_experts=event.routed_experts,
        )

    def build(self, template: Template) -> SampleResponse:
        """Return the response. All sequences must have ended."""
        prompt = self._prompt_event
        return SampleResponse(
            sequences=[
                replace(sequence, new_input_feature=self._continued(sequence, template)) for sequence in self._sequences
            ],
            prompt_token_ids=[int(token_id) for token_id in self._prompt['input_ids']],
            prompt_logprobs=prompt.logprobs if prompt else None,
            topk_prompt_logprobs=prompt.top_logprobs if prompt else None,
            prompt_probe=prompt.probe if prompt else None,
        )

    def _continued(self, sequence: SampledSequence, template: Template) -> InputFeature:
        """Return prompt and completion as a training feature, with the new turn appended to its messages."""
        feature = template.concat_input_feature(self._prompt, sequence.tokens)
        count, length = len(sequence.tokens), len(feature['input_ids'])
        old_logps = np.zeros(length, dtype=np.float32)
        # Like labels, log-probabilities are stored at the preceding token. Those of earlier turns are preserved.
        old_logps[: length - count] = self._prompt.get('old_logps', 0.0)
        old_logps[length - count - 1 : length - 1] = [entry[0][1] for entry in sequence.logprobs]
        feature['old_logps'] = old_logps
        experts = extended_experts(self._prompt.get('routed_experts'), sequence.routed_experts)
        if experts is not None:
            feature['routed_experts'] = experts
        if 'messages' in feature:
            turn = cast('dict[str, Any]', {'role': 'assistant', 'content': sequence.decoded})
            feature['messages'] = [*feature['messages'], turn]
        return feature
