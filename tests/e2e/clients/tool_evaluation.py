"""Evaluates a model with tools through inspect-ai and verifiers, and prints the results as JSON.

The test runs it in a separate process, because only this process has the packages of requirements.txt on its path.
"""

import asyncio
import json
import sys
import tempfile
from typing import Any

import inspect_ai
import verifiers
from datasets import Dataset
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import Tool, tool
from openai import AsyncOpenAI

QUESTION = 'Is it warm in Paris?'
ANSWER = 'It is warm.'


@tool(name='weather')
def weather_tool() -> Tool:
    """Make the tool of inspect-ai."""

    async def execute(city: str, degrees: int) -> str:
        """Return the weather of a city.

        Args:
            city: Name of the city.
            degrees: Temperature above which it is warm.
        """
        return f'warm in {city} above {degrees}'

    return execute


def use_inspect(base_url: str, api_key: str, name: str) -> dict[str, Any]:
    """Return the accuracy of an evaluation with tools, and the roles of its messages, over both of OpenAI's APIs."""
    task = inspect_ai.Task(
        dataset=[Sample(input=QUESTION, target=ANSWER)],
        solver=[use_tools(weather_tool()), generate()],
        scorer=includes(),
    )
    found: dict[str, Any] = {}
    for api in ('chats', 'responses'):
        with tempfile.TemporaryDirectory() as folder:
            (log,) = inspect_ai.eval(
                task,
                model=f'openai-api/twinkle/{name}',
                model_base_url=base_url,
                model_args={'api_key': api_key, 'responses_api': api == 'responses', 'responses_store': False},
                log_dir=folder,
                display='none',
            )
            assert log.status == 'success', log.error
            # The log reads its samples from the folder when they are used.
            found[api] = [message.role for message in log.samples[0].messages]
        found[f'{api} accuracy'] = log.results.scores[0].metrics['accuracy'].value
    return found


def use_verifiers(base_url: str, api_key: str, name: str) -> dict[str, Any]:
    """Return the reward, the number of calls and the roles of a rollout in an environment with tools."""

    def answer_reward(completion: Any, answer: str) -> float:
        return float(completion[-1]['content'] == answer)

    question = {'question': QUESTION, 'answer': ANSWER}
    environment = verifiers.ToolEnv(
        eval_dataset=Dataset.from_list([question]), tools=[warmth], rubric=verifiers.Rubric(funcs=[answer_reward])
    )

    async def run() -> Any:
        async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            return await environment.evaluate(client, name, sampling_args={'max_tokens': 200, 'temperature': 1.0})

    (rollout,) = asyncio.run(run())['outputs']
    roles = [message['role'] for message in rollout['completion']]
    return {'reward': rollout['reward'], 'calls': rollout['metrics']['total_tool_calls'], 'roles': roles}


def warmth(city: str, degrees: int) -> str:
    """Return the weather of a city.

    Args:
        city: Name of the city.
        degrees: Temperature above which it is warm.
    """
    return f'warm in {city} above {degrees}'


def main(base_url: str, api_key: str, name: str) -> None:
    """Evaluate the model `name` with both libraries, and print the results by their names."""
    uses = {'inspect': use_inspect, 'verifiers': use_verifiers}
    sys.stdout.write(json.dumps({library: use(base_url, api_key, name) for library, use in uses.items()}) + '\n')


if __name__ == '__main__':
    main(*sys.argv[1:])
