"""The state of one running chat (`Episode`) and its result (`Rollout`)."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, cast

import numpy as np

from twinkle.data_format import InputFeature, Message, SampledSequence, StopReason, Trajectory, VersionSpan
from twinkle.rollout.bridge import ChatFormat, bridge_tokens
from twinkle.rollout.env import Env, EnvStep
from twinkle.rollout.token_track import TokenTrack
from twinkle.template import extend_positions


class EndReason(StrEnum):
    """Reason why a chat ended."""

    DONE = 'done'
    """The environment ended the chat after a complete turn; with tools, after a turn without a tool call."""
    MAX_TURNS = 'max_turns'
    """The model used all its turns."""
    MAX_TOKENS = 'max_tokens'
    """The chat reached `max_trajectory_tokens` or the model's context, or the next reply leaves no space for a turn."""
    LENGTH = 'length'
    """A turn was cut at `sampling_params.max_tokens`, even if the environment then ended the chat."""
    ABORT = 'abort'
    """Sampling was aborted. The chat contains the tokens sampled so far."""
    ERROR = 'error'
    """The sampler's engine failed."""


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One sample of a trajectory, ready for training."""

    feature: InputFeature
    """All turns as one example: labels and `old_logps` at sampled tokens, `messages`, and `user_data` if given."""
    messages: list[Message]
    """The complete chat as text."""
    end_reason: EndReason
    turn_count: int
    """Number of turns of the model."""
    rewards: list[float]
    """Reward of each turn, except a turn that was aborted or failed."""
    version_spans: list[VersionSpan]
    """Token ranges of the feature with the adapter version that sampled them."""
    facts: dict[str, float]
    """Facts of the environment, summed over the chat."""
    trajectory_index: int
    """Index of the sampled trajectory in the call."""
    sample_index: int
    """Index among the samples of that trajectory."""

    @property
    def reward(self) -> float:
        """Sum of the rewards of all turns."""
        return sum(self.rewards)

    @property
    def sampled_count(self) -> int:
        """Number of tokens that the model sampled."""
        return int(sum(self.feature.get('completion_mask', ())))


@dataclass(eq=False)
class Episode:
    """A running chat.

    Concurrency: one thread at a time.
    """

    env: Env
    template: ChatFormat
    trajectory_index: int
    sample_index: int
    duplicate_index: int = 0
    """Index among the chats of a call that start with the same tokens."""
    chat: Trajectory = field(default_factory=lambda: cast('Trajectory', {}))
    prompt: InputFeature = field(default_factory=InputFeature)
    track: TokenTrack = field(default_factory=lambda: TokenTrack.of_prompt(()))
    messages: list[Message] = field(default_factory=list[Message])
    rewards: list[float] = field(default_factory=list[float])
    facts: Counter[str] = field(default_factory=Counter[str])
    turn_count: int = 0
    end_reason: EndReason | None = None

    def begin(self, trajectory: Trajectory, *, seed: int | None) -> None:
        """Reset the environment and tokenize the initial chat."""
        self.chat = self.env.reset(trajectory, seed=seed)
        self.prompt = self.template.encode(self.chat, add_generation_prompt=True)
        self.track = TokenTrack.of_prompt([int(token) for token in self.prompt.get('input_ids', ())])
        # The encoded messages include the default system message if the template adds one.
        formatted = self.prompt.get('messages') or self.chat.get('messages', [])
        self.messages = cast('list[Message]', list(formatted))

    @property
    def is_text_only(self) -> bool:
        """Whether the model's input consists of tokens only, without images or other media."""
        return set(self.prompt) <= _TOKEN_FIELDS | _TEXT_FIELDS

    def model_input(self) -> InputFeature:
        """Return the sampler's input: all tokens so far, and the media of the prompt."""
        others = {name: value for name, value in self.prompt.items() if name not in _TOKEN_FIELDS}
        if not self.is_text_only:
            # The labels distinguish sampled tokens from tokens that represent an image.
            return cast('InputFeature', {**others, **self._tokens()})
        return cast('InputFeature', {**others, 'input_ids': list(self.track.token_ids)})

    def add_turn(self, sequence: SampledSequence, *, turns_left: int, tokens_left: int | None) -> None:
        """Add a turn of the model and the environment's reply.

        Args:
            sequence: the turn.
            turns_left: number of turns that may follow this turn.
            tokens_left: number of tokens that may follow this turn. None: no known limit.
        """
        self.track = self.track.with_sampled(sequence)
        self.turn_count += 1
        self.messages.append({'role': 'assistant', 'content': sequence.decoded})
        if sequence.stop_reason in _FAILED_TURNS:
            self.end_reason = _FAILED_TURNS[sequence.stop_reason]
            return
        is_cut = sequence.stop_reason is StopReason.LENGTH
        step = self.env.step(self.messages[-1], is_last=is_cut or turns_left == 0 or tokens_left == 0)
        self.rewards.append(float(step.reward))
        self.facts.update(step.facts)
        if step.is_done:
            self.messages += step.messages
        # A truncated turn is not complete, even if the environment ended the chat.
        if is_cut:
            self.end_reason = EndReason.MAX_TOKENS if tokens_left == 0 else EndReason.LENGTH
        elif step.is_done:
            self.end_reason = EndReason.DONE
        elif tokens_left == 0:
            self.end_reason = EndReason.MAX_TOKENS
        elif turns_left == 0:
            self.end_reason = EndReason.MAX_TURNS
        else:
            self._add_reply(step, tokens_left=tokens_left)

    def _add_reply(self, step: EnvStep, *, tokens_left: int | None) -> None:
        if not step.messages:
            raise ValueError(
                f'{type(self.env).__name__}.step returned no messages and is_done=False; return messages or end the '
                f'chat'
            )
        reply = bridge_tokens(self.template, step.messages, last_token=self.track.token_ids[-1])
        if tokens_left is not None and len(reply) >= tokens_left:
            self.end_reason = EndReason.MAX_TOKENS
            return
        self.track = self.track.with_unsampled(reply)
        self.messages += step.messages

    def result(self) -> Rollout:
        """Return the rollout of a chat that has ended."""
        assert self.end_reason is not None  # noqa: S101 - callers pass ended chats only
        feature = self._tokens()
        others = {name: value for name, value in self.prompt.items() if name not in {*_TOKEN_FIELDS, 'messages'}}
        messages: list[Any] = self.messages
        return Rollout(
            feature=cast('InputFeature', {**others, **feature, 'messages': messages}),
            messages=self.messages,
            end_reason=self.end_reason,
            turn_count=self.turn_count,
            rewards=self.rewards,
            version_spans=list(self.track.version_spans),
            facts=dict(self.facts),
            trajectory_index=self.trajectory_index,
            sample_index=self.sample_index,
        )

    def _tokens(self) -> InputFeature:
        """Return the track as a feature. If the prompt has images, later tokens continue the prompt's positions."""
        feature, positions = self.track.feature(), np.asarray(self.prompt.get('position_ids', ()))
        if positions.ndim > 1:
            feature['position_ids'] = extend_positions(positions, len(self.track) - positions.shape[1])
        return feature


_FAILED_TURNS: Mapping[StopReason, EndReason] = {StopReason.ABORT: EndReason.ABORT, StopReason.ERROR: EndReason.ERROR}
_TOKEN_FIELDS = frozenset({'input_ids', 'attention_mask', 'position_ids', 'labels', 'completion_mask', 'length'})
"""Fields of a feature with one value per token, and its length; all are recomputed as the chat grows."""
_TEXT_FIELDS = frozenset({'messages', 'user_data'})
"""Fields of a feature that rewards read."""
