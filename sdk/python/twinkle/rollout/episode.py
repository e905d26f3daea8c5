"""One chat on its way, and what is left of it at its end."""

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
from twinkle.template import positions_behind


class EndReason(StrEnum):
    """Why a chat ended."""

    DONE = 'done'
    """The environment said so, to a whole turn; with tools: the model called none."""
    MAX_TURNS = 'max_turns'
    """The model had all its turns."""
    MAX_TOKENS = 'max_tokens'
    """The chat has no room for another turn, in `max_trajectory_tokens` or in the model's context."""
    LENGTH = 'length'
    """A turn was cut at `sampling_params.max_tokens`, also where the environment then said that it is done."""
    ABORT = 'abort'
    """The sampler was told to stop; the chat has what was drawn so far."""
    ERROR = 'error'
    """The sampler's engine failed."""


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One sample of a trajectory, ready to be trained on."""

    feature: InputFeature
    """All turns as one example: labels and `old_logps` where the model drew; `messages` and `user_data` for rewards."""
    messages: list[Message]
    """The whole chat as text, what the model said and was answered included."""
    end_reason: EndReason
    turn_count: int
    """Turns the model had."""
    rewards: list[float]
    """What each turn earned; a turn that the sampler did not finish earned nothing."""
    version_spans: list[VersionSpan]
    """Which version drew which tokens of the feature."""
    facts: dict[str, float]
    """The environment's numbers, added up."""
    trajectory_index: int
    """Of the trajectory it is a sample of."""
    sample_index: int
    """Among the samples of that trajectory."""

    @property
    def reward(self) -> float:
        """What all turns earned."""
        return sum(self.rewards)

    @property
    def sampled_count(self) -> int:
        """Tokens the model drew."""
        return int(sum(self.feature.get('completion_mask', ())))


@dataclass(eq=False)
class Episode:
    """A chat that goes on. For one thread."""

    env: Env
    template: ChatFormat
    trajectory_index: int
    sample_index: int
    twin_index: int = 0
    """Among the chats of a call that begin with the same tokens."""
    chat: Trajectory = field(default_factory=lambda: cast('Trajectory', {}))
    prompt: InputFeature = field(default_factory=InputFeature)
    track: TokenTrack = field(default_factory=lambda: TokenTrack.of_prompt(()))
    messages: list[Message] = field(default_factory=list[Message])
    rewards: list[float] = field(default_factory=list[float])
    facts: Counter[str] = field(default_factory=Counter[str])
    turn_count: int = 0
    end_reason: EndReason | None = None

    def begin(self, trajectory: Trajectory, *, seed: int | None) -> None:
        """Reset the world and tokenise the chat it begins with."""
        self.chat = self.env.reset(trajectory, seed=seed)
        self.prompt = self.template.encode(self.chat, add_generation_prompt=True)
        self.track = TokenTrack.of_prompt([int(token) for token in self.prompt.get('input_ids', ())])
        # As the template formatted them: with a default system message where it adds one.
        formatted = self.prompt.get('messages') or self.chat.get('messages', [])
        self.messages = cast('list[Message]', list(formatted))

    @property
    def is_text_alone(self) -> bool:
        """Whether its tokens are all that the model is given: no images or their like."""
        return set(self.prompt) <= _OF_TOKENS | _OF_TEXT

    def model_input(self) -> InputFeature:
        """Return what the sampler is to go on from: tokens, with images and their like as the template made them."""
        others = {name: value for name, value in self.prompt.items() if name not in _OF_TOKENS}
        if not self.is_text_alone:
            # Labels tell a token that the model drew from one that stands for an image.
            return cast('InputFeature', {**others, **self._tokens()})
        return cast('InputFeature', {**others, 'input_ids': list(self.track.token_ids)})

    def take(self, sequence: SampledSequence, *, turns_left: int, room: int | None) -> None:
        """Add a turn of the model and its answer.

        Args:
            sequence: the turn.
            turns_left: after this one.
            room: tokens the chat may still have after this turn; None where no bound is known.
        """
        self.track = self.track.with_sampled(sequence)
        self.turn_count += 1
        self.messages.append({'role': 'assistant', 'content': sequence.decoded})
        if sequence.stop_reason in _BROKEN:
            self.end_reason = _BROKEN[sequence.stop_reason]
            return
        is_cut = sequence.stop_reason is StopReason.LENGTH
        step = self.env.step(self.messages[-1], is_last=is_cut or turns_left == 0 or room == 0)
        self.rewards.append(float(step.reward))
        self.facts.update(step.facts)
        if step.is_done:
            self.messages += step.messages
        # A turn that was cut is no whole answer, whatever the environment made of it.
        if is_cut:
            self.end_reason = EndReason.MAX_TOKENS if room == 0 else EndReason.LENGTH
        elif step.is_done:
            self.end_reason = EndReason.DONE
        elif room == 0:
            self.end_reason = EndReason.MAX_TOKENS
        elif turns_left == 0:
            self.end_reason = EndReason.MAX_TURNS
        else:
            self._answer(step, room=room)

    def _answer(self, step: EnvStep, *, room: int | None) -> None:
        if not step.messages:
            raise ValueError(
                f'{type(self.env).__name__}.step: messages is empty and is_done False; say something or end'
            )
        shown = bridge_tokens(self.template, step.messages, last_token=self.track.token_ids[-1])
        if room is not None and len(shown) >= room:
            self.end_reason = EndReason.MAX_TOKENS
            return
        self.track = self.track.with_shown(shown)
        self.messages += step.messages

    def result(self) -> Rollout:
        """Return what is left of a chat that ended."""
        assert self.end_reason is not None  # noqa: S101 - only ended chats are asked
        feature = self._tokens()
        others = {name: value for name, value in self.prompt.items() if name not in {*_OF_TOKENS, 'messages'}}
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
        """Return the track; behind images, text goes on from the furthest of their positions."""
        feature, positions = self.track.feature(), np.asarray(self.prompt.get('position_ids', ()))
        if positions.ndim > 1:
            feature['position_ids'] = positions_behind(positions, len(self.track) - positions.shape[1])
        return feature


_BROKEN: Mapping[StopReason, EndReason] = {StopReason.ABORT: EndReason.ABORT, StopReason.ERROR: EndReason.ERROR}
_OF_TOKENS = frozenset({'input_ids', 'attention_mask', 'position_ids', 'labels', 'completion_mask', 'length'})
"""What a feature says token by token; of a growing chat it is said anew."""
_OF_TEXT = frozenset({'messages', 'user_data'})
"""What a feature says beside, for rewards."""
