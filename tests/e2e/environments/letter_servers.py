"""An environment of OpenEnv with its models: chats of two actions whose reward is the share of letters."""

from typing import Any

from openenv.core.env_server import Action, Environment, Observation, State


class TextAction(Action):
    """A text of the model."""

    text: str


class TextObservation(Observation):
    """A text for the model."""

    text: str


class LetterServer(Environment[TextAction, TextObservation, State]):
    """Rewards letters; the episode ends after `action_count` actions."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()
        self._action_count = 1

    def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> TextObservation:
        """Start an episode; the option `action_count` is its length."""
        del seed
        self._action_count = options.get('action_count', 1)
        self._state = State(episode_id=episode_id, step_count=0)
        return TextObservation(text='Write a word.')

    def step(self, action: TextAction, timeout_s: float | None = None, **options: Any) -> TextObservation:
        """Return the share of letters of the action as its reward."""
        del timeout_s, options
        self._state.step_count += 1
        share = sum(map(str.isalpha, action.text)) / max(len(action.text), 1)
        return TextObservation(text='More.', reward=share, done=self._state.step_count >= self._action_count)

    @property
    def state(self) -> State:
        """State of the episode."""
        return self._state
