"""Chat with a base model or one of your runs through OpenAI's SDK, streamed.

    python examples/openai_chat.py http://127.0.0.1:8080/v1 MODEL "Why is the sky blue?"

The program requires `pip install openai`, and the API key in TWINKLE_API_KEY. MODEL is a base model, a run's id,
`<run>@<version>`, or the path of a checkpoint.
"""

import argparse
import os

from openai import OpenAI


def main(base_url: str, model: str, question: str) -> None:
    """Ask one question; print the streamed answer, the version that generated it, and the numbers of tokens."""
    with OpenAI(base_url=base_url, api_key=os.environ['TWINKLE_API_KEY']) as client:
        stream = client.chat.completions.create(
            model=model,
            messages=[{'role': 'user', 'content': question}],
            max_completion_tokens=64,
            stream=True,
            stream_options={'include_usage': True},
        )
        for chunk in stream:
            for choice in chunk.choices:
                print(choice.delta.content or '', end='', flush=True)
            if attribution := (chunk.model_extra or {}).get('twinkle'):
                print('\nversions:', attribution['choices'])
            if chunk.usage is not None:
                print('tokens:', chunk.usage.prompt_tokens, 'in,', chunk.usage.completion_tokens, 'out')


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description='Chat with a model of a gateway, streamed.')
    parser.add_argument('base_url', help="address of the gateway's OpenAI API, such as http://127.0.0.1:8080/v1")
    parser.add_argument('model', help='base model, run, <run>@<version>, or path of a checkpoint')
    parser.add_argument('question')
    main(**vars(parser.parse_args()))
