"""Render chats with a model's own Jinja template in a sandbox, compatibly with transformers.

The template comes from a downloaded repository, so it runs in an immutable sandbox. The template can call only Jinja's
built-in functions and the functions that Hugging Face documents for chat templates.
"""

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from twinkle.template.errors import TemplateError

Chat = Sequence[Mapping[str, Any]]

# Markers around the text that a template declares as generated; `_without_marks` removes them. They are random per
# process, because a chat that contained them could add labels to a user's text.
_NONCE = secrets.token_hex(16)
_OPEN, _CLOSE = f'\U000f5a00{_NONCE}\U000f5a01', f'\U000f5a01{_NONCE}\U000f5a00'
_GENERATION = re.compile(r'\{%-?\s*generation\s*-?%\}')


@dataclass(frozen=True)
class RenderedChat:
    """The text of a chat."""

    text: str
    generated: tuple[tuple[int, int], ...]
    """Character ranges `[begin, end)` that the template declares as written by the assistant."""


class ChatTemplate:
    """A compiled chat template.

    Raises:
        TemplateError: the source is not valid Jinja.
    """

    def __init__(self, source: str, *, special_tokens: Mapping[str, str]) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f'the chat template is not valid Jinja, line {error.lineno}: {error.message}'
            ) from error
        self._source = source
        self._special_tokens = dict(special_tokens)

    def __reduce__(self) -> tuple[Callable[[str], 'ChatTemplate'], tuple[str]]:
        # Jinja's compiled templates cannot be pickled.
        return partial(ChatTemplate, special_tokens=self._special_tokens), (self._source,)

    @property
    def marks_generation(self) -> bool:
        """Whether the template marks the assistant's text with `{% generation %}`."""
        return _GENERATION.search(self._source) is not None

    def mentions(self, name: str) -> bool:
        """Return whether the template's source contains `name`, such as the name of a message field."""
        return name in self._source

    def render(self, messages: Chat, *, add_generation_prompt: bool = False, **context: Any) -> RenderedChat:
        """Return the text of a chat.

        Args:
            messages: the chat.
            add_generation_prompt: whether to end with the opening of an assistant turn.
            context: further variables of the template, such as `tools`.

        Raises:
            TemplateError: the template refuses the chat or fails.
        """
        values = self._special_tokens | {'documents': None, 'tools': None} | context
        try:
            marked = self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, **values)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
            raise TemplateError(f'the chat template refused the chat: {error}') from error
        except RecursionError:
            raise TemplateError('the chat template refused the chat: it is nested too deeply') from None
        return _without_marks(marked)


def read_chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """Return the chat template of a model folder, or None.

    Args:
        folder: model folder; `chat_template.jinja` in it has precedence.
        settings: tokenizer settings, whose `chat_template` is used otherwise.
    """
    path = folder / 'chat_template.jinja'
    if path.is_file():
        return path.read_text()
    template = settings.get('chat_template')
    if isinstance(template, list):
        named = {item['name']: item['template'] for item in cast('list[dict[str, str]]', template)}
        return named.get('default')
    return template


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}`: text written by the assistant."""

    tags = {'generation'}  # noqa: RUF012 - the type jinja2 declares

    def parse(self, parser: Parser) -> nodes.Node:
        """Wrap the block's text in markers."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(('name:endgeneration',), drop_needle=True)
        return nodes.CallBlock(self.call_method('_marked'), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return f'{_OPEN}{caller()}{_CLOSE}'


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters['tojson'] = _to_json
    # Jinja declares a narrower type for `globals`.
    functions = cast('dict[str, Any]', environment.globals)
    functions |= {'raise_exception': _raise_exception, 'strftime_now': _strftime_now}
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - chat templates use this signature
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002 - chat templates use this signature
) -> str:
    # The built-in filter of Jinja would change the prompt, because it escapes HTML characters.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now(tz=UTC).astimezone().strftime(form)


def _without_marks(marked: str) -> RenderedChat:
    pieces: list[str] = []
    spans: list[tuple[int, int]] = []
    length = begin = 0
    for piece in re.split(f'({_OPEN}|{_CLOSE})', marked):
        if piece == _OPEN:
            begin = length
        elif piece == _CLOSE:
            spans.append((begin, length))
        else:
            pieces.append(piece)
            length += len(piece)
    return RenderedChat(''.join(pieces), tuple(spans))
