"""Calls tools through litellm, LangChain, OpenAI's Agents SDK and Anthropic's SDK, and prints the results as JSON.

The test runs it in a separate process, because only this process has the packages of requirements.txt on its path.
"""

import asyncio
import json
import sys
from typing import Any

import anthropic
import litellm
from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
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


def main(base_url: str, api_key: str, name: str) -> None:
    """Use each client with the model `name`, and print the results by the name of the client."""
    uses = {'litellm': use_litellm, 'langchain': use_langchain, 'agents': use_agents, 'anthropic': use_anthropic}
    sys.stdout.write(json.dumps({client: use(base_url, api_key, name) for client, use in uses.items()}) + '\n')


if __name__ == '__main__':
    main(*sys.argv[1:])
