"""Tool calls in the parts of choices: text that calls a tool is replaced by the call."""

import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import replace

from twinkle.tool_calls import HermesQwenParser, JsonParser, StreamedParser, ToolCallStream
from twinkle_services.gateway.http.call import json_bytes
from twinkle_services.gateway.openai.choices import CalledTool, ChoiceDelta, TokenTexts
from twinkle_services.gateway.openai.tools import ToolUse
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.errors import InvalidField

_PARSERS: Mapping[str, StreamedParser] = {parser.name: parser for parser in (HermesQwenParser(), JsonParser())}
_ID_LETTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9
"""Mistral's chat templates accept only ids of nine letters and digits; all other templates accept them too."""
_THINK_OPEN = '<think>'
_TAIL_TOKENS = 16
"""Number of tokens at the end of a prompt that may contain the opening of a thought and a line end."""


class ToolCallReader:
    """Finds the tool calls in the choices of one response, in the format that the samplers of the base model report.

    Raises:
        InvalidField: the base model has no known format of calls.
    """

    def __init__(self, use: ToolUse, tool_format: str, *, base_model: str, tokens: TokenTexts) -> None:
        parser = _PARSERS.get(tool_format)
        if parser is None:
            problem = f'are not part of the chat template of {base_model!r}; remove them, or use another base model'
            raise InvalidField('tools', problem)
        self._use = use
        self._parser = _PARSERS[JsonParser.name] if use.is_forced else parser
        self._base_model = base_model
        self._tokens = tokens
        self._streams: dict[int, ToolCallStream] = {}
        self._counts: dict[int, int] = {}
        """Number of calls of each choice."""
        self._is_thought_open: bool | None = None
        """Whether the prompt ends inside a thought; None before the first part."""

    async def read(self, delta: ChoiceDelta, caller: Caller) -> ChoiceDelta:
        """Return a part of a choice with the calls that it completes, and without text that may belong to a call."""
        stream = self._streams.get(delta.index)
        if stream is None:
            stream = self._streams[delta.index] = await self._new_stream(delta.prompt_token_ids or (), caller)
        texts: list[str] = []
        calls: list[CalledTool] = []
        for part in stream.feed(delta.text, is_last=delta.finish_reason is not None):
            count = self._counts.get(delta.index, 0)
            if count and not self._use.is_parallel:
                # Only one call is allowed, so the turn ends after the first one.
                break
            if isinstance(part, str):
                texts.append(part)
                continue
            self._counts[delta.index] = count + 1
            arguments = json_bytes(part.arguments).decode()
            calls.append(CalledTool(index=count, call_id=_new_call_id(), name=part.name, arguments=arguments))
        has_calls = delta.finish_reason == 'stop' and delta.index in self._counts
        reason = 'tool_calls' if has_calls else delta.finish_reason
        return replace(delta, text=''.join(texts), calls=calls, finish_reason=reason)

    async def _new_stream(self, prompt_token_ids: Sequence[int], caller: Caller) -> ToolCallStream:
        if self._is_thought_open is None:
            self._is_thought_open = not self._use.is_forced and await self._ends_in_thought(prompt_token_ids, caller)
        use = self._use
        return ToolCallStream(self._parser, tools=use.tools, names=use.names, is_thought_open=self._is_thought_open)

    async def _ends_in_thought(self, prompt_token_ids: Sequence[int], caller: Caller) -> bool:
        tail = prompt_token_ids[-_TAIL_TOKENS:]
        texts = await self._tokens.get(caller, self._base_model, tail)
        return (
            b''.join(texts[token_id].piece for token_id in tail).decode(errors='replace').rstrip().endswith(_THINK_OPEN)
        )


def _new_call_id() -> str:
    return ''.join(secrets.choice(_ID_LETTERS) for _ in range(_ID_LENGTH))
