"""The tokens between two turns of a model: the end of its turn, what it is answered, the opening of its next."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, cast

from twinkle.data_format import InputFeature
from twinkle.rollout.errors import ChatCannotGoOn

_STAND_IN = 'said7f3a'
"""Stands in the chat template's text where the model's turn was, which is never rendered again."""


class ChatTokens(Protocol):
    """What the room needs of a tokenizer; `twinkle.template.ChatTokenizer` has it."""

    @property
    def special_texts(self) -> frozenset[str]:
        """Text of every special token."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, special ones read as such."""
        ...


class ChatFormat(Protocol):
    """What the room needs of a template; `twinkle.template.Template` has it."""

    @property
    def tokenizer(self) -> Any:
        """A `ChatTokens`."""
        ...

    def encode(self, trajectory: Mapping[str, Any], *, add_generation_prompt: bool = False) -> InputFeature:
        """Return a chat as tokens."""
        ...

    def render(self, trajectory: Mapping[str, Any], *, add_generation_prompt: bool = False) -> str:
        """Return a chat as text."""
        ...


def bridge_tokens(template: ChatFormat, messages: Sequence[Mapping[str, Any]], *, last_token: int) -> list[int]:
    """Return what stands between a model's turn and its next, the answer `messages` among it.

    Special tokens written out in the answer are broken up first: a tool's output cannot open a turn.

    Args:
        template: the model's.
        messages: the answer, at least one.
        last_token: the turn's last one. Where it ended the turn, the end is not written again.

    Raises:
        ChatCannotGoOn: the chat template shows no earlier turns.
        TemplateError: it refuses such a chat, such as one with tools' answers.
        InvalidTrajectory: a message is malformed; names the field, counted from two.
    """
    tokenizer: ChatTokens = template.tokenizer
    answer = [_harmless(message, tokenizer.special_texts) for message in messages]
    chat = [{'role': 'user', 'content': '.'}, {'role': 'assistant', 'content': _STAND_IN}, *answer]
    text = template.render({'messages': chat}, add_generation_prompt=True)
    _, found, behind = text.partition(_STAND_IN)
    if not found:
        raise ChatCannotGoOn('the chat template leaves out what the assistant said in an earlier turn')
    tokens = tokenizer.encode(behind)
    return tokens[1:] if tokens and tokens[0] == last_token else tokens


def _harmless(message: Mapping[str, Any], special_texts: Iterable[str]) -> dict[str, Any]:
    content = message.get('content')
    if isinstance(content, str):
        return {**message, 'content': without_special(content, special_texts)}
    if isinstance(content, list):
        parts = cast('list[dict[str, Any]]', content)
        return {**message, 'content': [_harmless_part(part, special_texts) for part in parts]}
    return dict(message)


def _harmless_part(part: dict[str, Any], special_texts: Iterable[str]) -> dict[str, Any]:
    text = part.get('text')
    return {**part, 'text': without_special(text, special_texts)} if isinstance(text, str) else part


def without_special(text: str, special_texts: Iterable[str]) -> str:
    """Return a text in which no special token stands: a space goes behind the first character of each."""
    for special in sorted(special_texts, key=len, reverse=True):
        if len(special) > 1:
            text = text.replace(special, f'{special[0]} {special[1:]}')
    return text
