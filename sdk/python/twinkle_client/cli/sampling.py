"""`twinkle sample`: one completion on the terminal."""

import time
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import typer

from twinkle_client.cli.session import (
    JsonOption,
    StateDirOption,
    console,
    error_console,
    exit_on_interrupt,
    fail,
    open_client,
    print_json,
)
from twinkle_client.client import TwinkleClient
from twinkle_client.sampler import SampleDelta, Sampler


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """Options of `twinkle sample`."""

    prompt: Annotated[str, typer.Argument(help='User message.')]
    adapter: Annotated[
        str, typer.Option('--adapter', help='Adapter id or twinkle:// path. Default: the base model.')
    ] = ''
    version: Annotated[int | None, typer.Option('--version', help='Version of the adapter. Default: the newest.')] = (
        None
    )
    model: Annotated[str, typer.Option('--model', help='Base model; required if the server has several.')] = ''
    max_tokens: Annotated[int, typer.Option('--max-tokens', min=1, help='Maximum number of generated tokens.')] = 128
    temperature: Annotated[float, typer.Option('--temperature', min=0.0, help='Sampling temperature; 0 is greedy.')] = (
        0.0
    )
    is_json: JsonOption = False
    state_dir: StateDirOption = None


def sample(given: SampleOptions) -> None:
    """Send a prompt to a model and stream its answer. Ctrl-C stops the generation."""
    if given.version is not None and not given.adapter:
        fail('--version requires --adapter')
    if not given.prompt:
        fail('the prompt is empty; give a text')
    chat = {'messages': [{'role': 'user', 'content': given.prompt}]}
    params = {'max_tokens': given.max_tokens, 'temperature': given.temperature}
    adapter, version = given.adapter, given.version
    target: dict[str, Any] = {'adapter_uri': adapter} if adapter.startswith('twinkle://') else {'adapter_name': adapter}
    with exit_on_interrupt('the answer is incomplete'), open_client(given.state_dir) as client:
        sampler = Sampler(given.model or _only_model(client), client=client)
        answer = _Answer()
        begin = time.monotonic()
        waiting = error_console.status('waiting for the first token')
        waiting.start()
        try:
            for delta in sampler.sample_stream(chat, params, version=version, **target):
                waiting.stop()
                if not given.is_json:
                    console.print(delta.text, end='', markup=False, highlight=False, soft_wrap=True)
                answer.add(delta)
        finally:
            waiting.stop()
        seconds = time.monotonic() - begin
    if given.is_json:
        print_json({**asdict(answer), 'seconds': seconds})
        return
    # A checkpoint is shown by its path, because its version is only a number of steps.
    is_version = 'adapter_name' in target and adapter and answer.version
    weights = f'version {answer.version}' if is_version else adapter or 'base model'
    count = len(answer.tokens)
    console.print(f'\n[dim]{count} tokens, {count / seconds:.1f} tokens/s, {weights}[/dim]')


@dataclass
class _Answer:
    """The answer so far."""

    text: str = ''
    tokens: list[int] = field(default_factory=list[int])
    version: int = 0
    """Version that generated the last tokens; 0 for the base model."""
    stop_reason: str = ''

    def add(self, delta: SampleDelta) -> None:
        self.text += delta.text
        self.tokens.extend(delta.tokens)
        self.version = self.version if delta.version is None else delta.version
        self.stop_reason = delta.stop_reason or self.stop_reason


def _only_model(client: TwinkleClient) -> str:
    services = client.get_server_info().services
    names = sorted({model.base_model for service in services for model in service.base_models if model.is_sampleable})
    if len(names) != 1:
        fail(f'the server has {", ".join(names)}; choose one with --model' if names else 'the server has no sampler')
    return names[0]
