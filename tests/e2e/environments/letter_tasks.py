"""A taskset of verifiers, with its harness: chats of two turns whose reward is the share of letters.

verifiers imports this module by the id of the taskset.
"""

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI

__all__ = ['LetterHarness', 'LetterTaskset']

QUESTIONS = ('Write a word.', 'Tell me a story.')
ADD: dict[str, Any] = {
    'type': 'function',
    'function': {
        'name': 'add',
        'description': 'Add two numbers.',
        'parameters': {'type': 'object', 'properties': {'a': {'type': 'integer'}, 'b': {'type': 'integer'}}},
    },
}


class LetterTask(vf.Task[vf.TaskData]):
    """A question, and the rewards of its chat."""

    @vf.reward
    async def letters(self, trace: vf.Trace) -> float:
        """Return the mean share of letters in the turns of the model."""
        texts = [message.content or '' for message in trace.branches[-1].messages if message.role == 'assistant']
        return sum(sum(map(str.isalpha, text)) / max(len(text), 1) for text in texts) / len(texts)

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        """Return the number of turns of the model."""
        return float(trace.num_turns)


class LetterTaskset(vf.Taskset[LetterTask]):
    """The questions."""

    def load(self) -> Iterator[LetterTask]:
        """Yield one task per question."""
        for question in QUESTIONS:
            yield LetterTask(vf.TaskData(prompt=question, system_prompt='Write letters.'))


class LetterHarnessConfig(vf.HarnessConfig):
    """Options of the harness."""

    user_turns: int = 0
    """Number of messages of the user after the question."""
    has_tool: bool = False


class LetterHarness(vf.Harness[LetterHarnessConfig]):
    """Runs the chat in this process, with a tool that the harness runs itself."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, *others: Any) -> Any:
        """Run the chat to its end."""
        del trace, runtime
        system, question = self.resolve_prompt(others[-1])
        messages: list[Any] = [{'role': 'system', 'content': system}, {'role': 'user', 'content': question}]
        user_turns, options = self.config.user_turns, {'tools': [ADD]} if self.config.has_tool else {}
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            while True:
                completion = await client.chat.completions.create(model=ctx.model, messages=messages, **options)
                message = completion.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if message.tool_calls:
                    messages += [
                        {'role': 'tool', 'tool_call_id': call.id, 'content': 'The sum is 3.'}
                        for call in message.tool_calls
                    ]
                elif user_turns:
                    user_turns -= 1
                    messages.append({'role': 'user', 'content': 'More.'})
                else:
                    return vf.ProgramResult(exit_code=0, stdout='', stderr='')
