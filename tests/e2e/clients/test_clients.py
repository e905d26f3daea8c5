"""Unmodified libraries call tools of a version of an adapter through the gateway, whose engine is scripted.

The libraries are litellm, LangChain, the SDKs of two vendors, inspect-ai and verifiers.
"""

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from fixtures.client_programs import run_program
from fixtures.openai_gateway import RUN, openai_gateway
from fixtures.openai_tools import last_chat
from fixtures.running_gateway import ADMIN_KEY
from fixtures.scripted_engine import ScriptedEngine
from twinkle_services.sampler.domain.generation import GenerationEvent, GenerationRequest

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

ANSWER = 'It is warm.'
ARGUMENTS = '{"city": "Paris", "degrees": 21}'


class AgentEngine(ScriptedEngine):
    """Calls the first tool, answers after its result, and gives the same arguments in every constrained output."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """Select the answer by the chat and the form."""
        text = self._text(request)
        self.answers = {0: [text[begin : begin + 3] for begin in range(0, len(text), 3)]}
        return super().generate(request)

    def _text(self, request: GenerationRequest) -> str:
        chat, form = last_chat(self), request.params.structured_output
        tools = chat.get('tools')
        if form is not None and not tools:
            return ARGUMENTS
        if not tools or chat['messages'][-1]['role'] == 'tool':
            return ANSWER
        name = tools[0]['function']['name']
        if form is not None:
            return f'{{"name": "{name}", "parameters": {ARGUMENTS}}}'
        return f'I look.\n<tool_call>\n{{"name": "{name}", "arguments": {ARGUMENTS}}}\n</tool_call>'


async def test_libraries_call_tools(tmp_path: Path) -> None:
    """Each library receives its calls, sends their results, and parses structured outputs, complete and streamed."""
    async with openai_gateway(tmp_path, AgentEngine()) as running:
        results = await run_program('program.py', running.base_url, ADMIN_KEY, f'{RUN}@2')
    assert results['litellm'] == {
        'complete': ['weather'],
        'streamed': ['weather'],
        'named': ['weather'],
        'response': ANSWER,
    }
    report = {'city': 'Paris', 'degrees': 21}
    assert results['langchain'] == {
        **{name: ['Paris'] for name in ('complete', 'streamed', 'strict', 'forced')},
        'json_schema': report,
        'function_calling': report,
        'json_mode': report,
        'agent': ['human', 'ai', 'tool', 'ai'],
    }
    assert set(results['agents'].values()) == {ANSWER}
    assert len(results['agents']) == 4
    assert results['anthropic'] == {'complete': ['text', 'tool_use'], 'streamed': ['text', 'tool_use']}


async def test_evaluations_call_tools(tmp_path: Path) -> None:
    """inspect-ai and verifiers' ToolEnv call the tool, send its result, and score the answer."""
    async with openai_gateway(tmp_path, AgentEngine()) as running:
        results = await run_program('tool_evaluation.py', running.base_url, ADMIN_KEY, f'{RUN}@2')
    roles = ['assistant', 'tool', 'assistant']
    assert results['inspect'] == {
        'chats': ['user', *roles],
        'chats accuracy': 1.0,
        'responses': ['user', *roles],
        'responses accuracy': 1.0,
    }
    assert results['verifiers'] == {'reward': 1.0, 'calls': 1.0, 'roles': roles}
