"""Choices as chats and completions show them, whole and in chunks."""

from collections.abc import Sequence
from typing import Any, Protocol

from services.gateway.openai.asked import Asked
from services.gateway.openai.pieces import Piece, ScoredToken
from services.gateway.openai.token_names import TokenName


class Shape(Protocol):
    """How one of the two APIs shows a choice."""

    object_name: str
    chunk_object_name: str
    id_prefix: str

    def choice(self, piece: Piece) -> dict[str, Any]:
        """Return a whole choice."""
        ...

    def chunk(self, piece: Piece) -> dict[str, Any] | None:
        """Return a part of a choice; None where it shows nothing."""
        ...

    def prompt_fields(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Return what stands beside the choices; `pieces` are the first of each."""
        ...


class ChatShape:
    """Implements `Shape` for chats."""

    object_name = 'chat.completion'
    chunk_object_name = 'chat.completion.chunk'
    id_prefix = 'chatcmpl'

    def __init__(self, asked: Asked) -> None:
        """Show what `asked` wants to see."""
        self._asked = asked

    def choice(self, piece: Piece) -> dict[str, Any]:
        """Return a whole choice."""
        message = {'role': 'assistant', 'content': piece.text, 'refusal': None}
        return {'index': piece.index, 'message': message, **self._rest(piece)}

    def chunk(self, piece: Piece) -> dict[str, Any] | None:
        """Return a part of a choice; None where it shows nothing."""
        if piece.prompt_token_ids is not None:
            delta = {'role': 'assistant', 'content': ''}
        elif piece.text or piece.scored or (piece.token_ids and self._asked.are_token_ids_returned):
            delta = {'content': piece.text}
        elif piece.finish_reason:
            delta = {}
        else:
            return None
        return {'index': piece.index, 'delta': delta, **self._rest(piece)}

    def prompt_fields(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Return the prompt's tokens, where asked for."""
        if not self._asked.are_token_ids_returned or not pieces or pieces[0].prompt_token_ids is None:
            return {}
        return {'prompt_token_ids': list(pieces[0].prompt_token_ids)}

    def _rest(self, piece: Piece) -> dict[str, Any]:
        logprobs = None
        if self._asked.top_logprobs is not None and piece.token_ids:
            logprobs = {'content': [_chat_token(token) for token in piece.scored], 'refusal': None}
        rest: dict[str, Any] = {'logprobs': logprobs, 'finish_reason': piece.finish_reason}
        if self._asked.are_token_ids_returned:
            rest['token_ids'] = list(piece.token_ids)
        return rest


class CompletionShape:
    """Implements `Shape` for completions."""

    object_name = 'text_completion'
    chunk_object_name = 'text_completion'
    id_prefix = 'cmpl'

    def __init__(self, asked: Asked) -> None:
        """Show what `asked` wants to see."""
        self._asked = asked

    def choice(self, piece: Piece) -> dict[str, Any]:
        """Return a choice, whole or a part of it."""
        choice: dict[str, Any] = {
            'index': piece.index,
            'text': piece.text,
            'logprobs': _completion_logprobs(piece.scored) if self._asked.top_logprobs is not None else None,
            'finish_reason': piece.finish_reason,
        }
        if self._asked.are_token_ids_returned:
            choice['token_ids'] = list(piece.token_ids)
            if piece.prompt_token_ids is not None:
                choice['prompt_token_ids'] = list(piece.prompt_token_ids)
        return choice

    def chunk(self, piece: Piece) -> dict[str, Any] | None:
        """Return a part of a choice; None where it shows nothing."""
        is_shown = piece.text or piece.scored or piece.finish_reason or self._asked.are_token_ids_returned
        return self.choice(piece) if is_shown else None

    def prompt_fields(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Return nothing: each choice has its own prompt."""
        del pieces
        return {}


def _chat_token(token: ScoredToken) -> dict[str, Any]:
    top = [{**_chat_name(name), 'logprob': logprob} for name, logprob in token.top]
    return {**_chat_name(token.name), 'logprob': token.logprob, 'top_logprobs': top}


def _chat_name(name: TokenName) -> dict[str, Any]:
    return {'token': name.text, 'bytes': list(name.piece)}


def _completion_logprobs(scored: Sequence[ScoredToken]) -> dict[str, Any]:
    return {
        'tokens': [_plain_name(token.name) for token in scored],
        'token_logprobs': [token.logprob for token in scored],
        'top_logprobs': [_top_by_name(token) for token in scored],
        'text_offset': [token.text_offset for token in scored],
    }


def _top_by_name(token: ScoredToken) -> dict[str, float] | None:
    if token.logprob is None:
        return None
    found: dict[str, float] = {}
    for name, logprob in sorted([*token.top, (token.name, token.logprob)], key=lambda entry: -entry[1]):
        # Of tokens that look alike the most likely one is told.
        found.setdefault(_plain_name(name), logprob)
    return found


def _plain_name(name: TokenName) -> str:
    """Return a token's text; what is no text by itself is spelled in bytes, as this API always did."""
    try:
        return name.piece.decode()
    except UnicodeDecodeError:
        return 'bytes:' + ''.join(f'\\x{byte:02x}' for byte in name.piece)
