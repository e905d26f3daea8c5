"""The tokens between two turns of a model: the end of one turn, the reply to it, and the start of the next turn."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, cast

from twinkle.data_format import InputFeature
from twinkle.rollout.errors import ChatCannotGoOn

_PLACEHOLDER = 'turn7f3a'
"""Content of the model's turn in the rendered chat. The sampled tokens of the turn are never rendered again."""


class ChatTokens(Protocol):
    """The part of a tokenizer that rollouts use; `twinkle.template.ChatTokenizer` implements it."""

    @property
    def special_texts(self) -> frozenset[str]:
        """Text of every special token."""
        ...

    def encode(self, text: str) -> list[int]:
        """Tokenize a text; the text of a special token becomes that token."""
        ...


class ChatFormat(Protocol):
    """The part of a template that rollouts use; `twinkle.template.Template` implements it."""

    @property
    def tokenizer(self) -> Any:
        """Tokenizer of the model, a `ChatTokens`."""
        ...

    def encode(self, trajectory: Mapping[str, Any], *, add_generation_prompt: bool = False) -> InputFeature:
        """Convert a chat to tokens."""
        ...

    def render(self, trajectory: Mapping[str, Any], *, add_generation_prompt: bool = False) -> str:
        """Convert a chat to text."""
        ...


def bridge_tokens(template: ChatFormat, messages: Sequence[Mapping[str, Any]], *, last_token: int) -> list[int]:
    """Return the tokens from the end of a model's turn to the start of its next turn, including the reply.

    Text in the reply that spells a special token is changed first, so that a tool's output cannot start a turn.

    Args:
        template: chat template of the model.
        messages: the reply to the turn, at least one message.
        last_token: last token of the turn. If it is the end-of-turn token, that token is not repeated.

    Raises:
        ChatCannotGoOn: the chat template does not render earlier turns.
        TemplateError: the chat template refuses the chat, for example because it does not support tool results.
        InvalidTrajectory: a message is malformed. In the reported field, the reply starts at `messages[2]`.
    """
    tokenizer: ChatTokens = template.tokenizer
    reply = [_escape(message, tokenizer.special_texts) for message in messages]
    chat = [{'role': 'user', 'content': '.'}, {'role': 'assistant', 'content': _PLACEHOLDER}, *reply]
    text = template.render({'messages': chat}, add_generation_prompt=True)
    _, found, bridge = text.partition(_PLACEHOLDER)
    if not found:
        raise ChatCannotGoOn('the chat template omits earlier assistant turns; use one that renders them')
    tokens = tokenizer.encode(bridge)
    return tokens[1:] if tokens and tokens[0] == last_token else tokens


def _escape(message: Mapping[str, Any], special_texts: Iterable[str]) -> dict[str, Any]:
    content = message.get('content')
    if isinstance(content, str):
        return {**message, 'content': without_special(content, special_texts)}
    if isinstance(content, list):
        parts = cast('list[dict[str, Any]]', content)
        return {**message, 'content': [_escape_part(part, special_texts) for part in parts]}
    return dict(message)


def _escape_part(part: dict[str, Any], special_texts: Iterable[str]) -> dict[str, Any]:
    text = part.get('text')
    return {**part, 'text': without_special(text, special_texts)} if isinstance(text, str) else part


def without_special(text: str, special_texts: Iterable[str]) -> str:
    """Return a text without special tokens, by inserting a space after the first character of each.

    A special token of one character is kept.
    """
    for special in sorted(special_texts, key=len, reverse=True):
        if len(special) > 1:
            text = text.replace(special, f'{special[0]} {special[1:]}')
    return text
