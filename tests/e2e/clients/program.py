"""Calls tools through libraries for agents and for evaluations, and prints the results as JSON.

The libraries are litellm, LangChain, OpenAI's Agents SDK, Anthropic's SDK, inspect-ai and verifiers. The test runs the
program in a separate process, because only this process has the packages of requirements.txt on its path.
"""

import asyncio
import json
import sys
import tempfile
from typing import Any

import anthropic
import inspect_ai
import litellm
import verifiers
from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from datasets import Dataset
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import Tool
from inspect_ai.tool import tool as inspect_tool
from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI
from pydantic import BaseModel

ASK: list[Any] = [{'role': 'user', 'content': 'Is it warm in Paris?'}]
PARAMETERS: dict[str, Any] = {'type': 'object', 'properties': {'city': {'type': 'string'}}, 'required': ['city']}
FUNCTION: dict[str, Any] = {'name': 'weather', 'description': 'Weather of a city', 'parameters': PARAMETERS}


class Report(BaseModel):
    """Structured output."""

    city: str
    degrees: int


def weather(city: str) -> str:
    """Return the weather of a city."""
    return f'warm in {city}'


def use_litellm(base_url: str, api_key: str, name: str) -> dict[str, Any]:
    """Return the calls of complete, streamed and named responses, and a text of the API of responses."""
    request: dict[str, Any] = {'model': f'openai/{name}', 'api_base': base_url, 'api_key': api_key}
    tools: list[Any] = [{'type': 'function', 'function': FUNCTION}]
    chat: dict[str, Any] = {**request, 'messages': ASK, 'tools': tools}
    named = {'type': 'function', 'function': {'name': 'weather'}}
    responses = {
        'complete': litellm.completion(**chat),
        'streamed': litellm.stream_chunk_builder(list(litellm.completion(**chat, stream=True))),
        'named': litellm.completion(**chat, tool_choice=named),
    }
    calls = {name: response.choices[0].message.tool_calls for name, response in responses.items()}
    names = {name: [call.function.name for call in found] for name, found in calls.items()}
    return {**names, 'response': litellm.responses(**request, input='Hi').output[0].content[0].text}


def use_langchain(base_url: str, api_key: str, name: str) -> dict[str, Any]:
    """Return calls, structured outputs of each method, and the messages of an agent."""
    model = ChatOpenAI(model=name, base_url=base_url, api_key=api_key, max_retries=0)
    bound = model.bind_tools([tool(weather)])
    streamed: Any = None
    for chunk in bound.stream('Hi'):
        streamed = chunk if streamed is None else streamed + chunk
    agent = create_agent(model, [tool(weather)], system_prompt='Be short.')
    found = {
        'complete': bound.invoke('Hi').tool_calls,
        'streamed': streamed.tool_calls,
        'strict': model.bind_tools([tool(weather)], strict=True, parallel_tool_calls=False).invoke('Hi').tool_calls,
        'forced': model.bind_tools([tool(weather)], tool_choice='weather').invoke('Hi').tool_calls,
    }
    methods = ('json_schema', 'function_calling', 'json_mode')
    return {
        **{name: [call['args']['city'] for call in calls] for name, calls in found.items()},
        **{method: dict(model.with_structured_output(Report, method=method).invoke('Hi')) for method in methods},
        'agent': [message.type for message in agent.invoke({'messages': ASK})['messages']],
    }


def use_agents(base_url: str, api_key: str, name: str) -> dict[str, Any]:
    """Return the final outputs of agents over both of OpenAI's APIs, complete and streamed."""
    set_tracing_disabled(disabled=True)

    async def run(kind: Any, *, is_streamed: bool) -> str:
        async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            model = kind(model=name, openai_client=client)
            agent = Agent(name='A', instructions='Be short.', tools=[function_tool(weather)], model=model)
            if not is_streamed:
                return (await Runner.run(agent, 'Is it warm?')).final_output
            result = Runner.run_streamed(agent, 'Is it warm?')
            async for _ in result.stream_events():
                pass
            return result.final_output

    kinds = {'chats': OpenAIChatCompletionsModel, 'responses': OpenAIResponsesModel}
    return {
        f'{name} {is_streamed}': asyncio.run(run(kind, is_streamed=is_streamed))
        for name, kind in kinds.items()
        for is_streamed in (False, True)
    }


def use_anthropic(base_url: str, api_key: str, name: str) -> dict[str, Any]:
    """Return the types of the blocks of complete and streamed messages."""
    client = anthropic.Anthropic(base_url=base_url.removesuffix('/v1'), api_key=api_key, max_retries=0)
    tools: list[Any] = [{'name': 'weather', 'description': 'Weather', 'input_schema': PARAMETERS}]
    request: dict[str, Any] = {
        'model': name,
        'max_tokens': 200,
        'messages': ASK,
        'tools': tools,
        'system': 'Be short.',
    }
    with client.messages.stream(**request) as stream:
        streamed = stream.get_final_message()
    messages = {'complete': client.messages.create(**request), 'streamed': streamed}
    return {name: [block.type for block in message.content] for name, message in messages.items()}


@inspect_tool(name='weather')
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
        dataset=[Sample(input='Is it warm in Paris?', target='It is warm.')],
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
        found[api] = [message.role for message in log.samples[0].messages]
        found[f'{api} accuracy'] = log.results.scores[0].metrics['accuracy'].value
    return found


def use_verifiers(base_url: str, api_key: str, name: str) -> dict[str, Any]:
    """Return the reward, the number of calls and the roles of a rollout in an environment with tools."""

    def answer_reward(completion: Any, answer: str) -> float:
        return float(completion[-1]['content'] == answer)

    question = {'question': 'Is it warm in Paris?', 'answer': 'It is warm.'}
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


USES = {
    'litellm': use_litellm,
    'langchain': use_langchain,
    'agents': use_agents,
    'anthropic': use_anthropic,
    'inspect': use_inspect,
    'verifiers': use_verifiers,
}


def main(base_url: str, api_key: str, name: str) -> None:
    """Use each client with the model `name`, and print the results by the name of the client."""
    results = {client: use(base_url, api_key, name) for client, use in USES.items()}
    sys.stdout.write(json.dumps(results) + '\n')


if __name__ == '__main__':
    main(*sys.argv[1:])
