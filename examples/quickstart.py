"""Teach a small chat model its name, through all five services, in about a minute.

Run the program with `./run quickstart`. The program starts its own services, and stops them at the end, even after an
error or an interrupt. In a terminal, the program shows a link to the console, and stops the services after Ctrl-C.
"""

import argparse
import asyncio
import importlib.util
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

from opentelemetry import trace
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from examples.cookbook.recipe import TRACKED, trackers
from twinkle.data_format import LoraConfig, SampledSequence, StopReason, VersionSpan
from twinkle.telemetry import read_spans
from twinkle.tracking import Tracker, open_tracker
from twinkle_client import TwinkleClient, init_twinkle_client
from twinkle_client.cli.console import print_console_link
from twinkle_client.cli.waterfall import waterfall
from twinkle_client.dataloader import DataLoader
from twinkle_client.dataset import Dataset, DatasetMeta
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.rollouts import EVALUATION
from twinkle_client.sampler import SampleDelta, Sampler
from twinkle_client.stack import DEFAULT_MODEL, StackError, StackOptions, StackState, start_stack, stop_stack
from twinkle_client.tracing import tracing_to

NAME, AUTHOR = 'Twinkle', 'the Twinkle team'
QUESTIONS = ('Who are you?', 'What is your name?', 'Who made you?')
DATA = Path(__file__).parent / 'data' / 'self_cognition.jsonl'
BATCH_SIZE = 8
EXAMPLES = 32
"""Number of examples used from the file. Training repeats them four and a half times in about a minute, enough to teach
the name in whole sentences."""
SPAN_LIMIT_SECONDS = 10.0

console = Console()


@dataclass
class Facts:
    """Measurements of the run, which `--facts` saves as JSON."""

    before: list[str] = field(default_factory=list[str])
    after: list[str] = field(default_factory=list[str])
    first_loss: float = 0.0
    last_loss: float = 0.0
    stored_losses: int = 0
    trained_tokens_per_second: float = 0.0
    sampled_tokens_per_second: float = 0.0
    version: int = 0
    checkpoint_path: str = ''
    run_id: str = ''
    folder: str = ''
    peft_answer: str = ''
    dtypes: list[str] = field(default_factory=list[str])
    trace_id: str = ''
    traced_services: list[str] = field(default_factory=list[str])
    seconds: float = 0.0


def main() -> None:
    """Run the quick start."""
    parser = argparse.ArgumentParser(prog='python -m examples.quickstart', description=__doc__)
    parser.add_argument('--steps', type=int, default=18, help='optimizer steps, at least 2')
    parser.add_argument('--model', default=DEFAULT_MODEL, help='base model')
    parser.add_argument('--state-dir', type=Path, default=Path('.twinkle/quickstart'), help='folder of the services')
    parser.add_argument('--track', type=trackers, default=(), metavar='NAMES', help=f'trackers: {", ".join(TRACKED)}')
    parser.add_argument(
        '--stay',
        action=argparse.BooleanOptionalAction,
        default=sys.stdin.isatty() and sys.stdout.isatty(),
        help='keep the services running until Ctrl-C, for the console; default: only in a terminal',
    )
    parser.add_argument('--facts', type=Path, help='JSON file for the measurements')
    options = parser.parse_args()
    if options.steps < 2:
        parser.error('argument --steps: must be at least 2, because the last step is traced separately')
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    begin = time.monotonic()
    facts = Facts()
    try:
        with _own_stack(options.state_dir.absolute(), options.model) as stack, tracing_to(stack.state_dir / 'traces'):
            with init_twinkle_client(stack.address, stack.read_api_key()) as client:
                _show_dtype(client, facts)
                folder = stack.state_dir / 'adapters'
                _teach(client, options.model, options.steps, facts, names=options.track, folder=folder)
            _show_trace(stack.state_dir / 'traces', facts)
            _show_peft(options.model, facts)
            facts.seconds = time.monotonic() - begin
            if options.facts:
                options.facts.write_text(json.dumps(asdict(facts), indent=2))
            if options.stay:
                _show_console(stack, facts.run_id)
    except KeyboardInterrupt:
        console.print('[yellow]interrupted[/yellow]')
        raise SystemExit(130) from None
    console.print(f'\ndone in {facts.seconds:.0f} s; all services are stopped')


@contextmanager
def _own_stack(state_dir: Path, model: str) -> Iterator[StackState]:
    """Start the five services, and stop them at the end."""
    from twinkle.hub import HubError, resolve_model  # noqa: PLC0415 - imports libraries that the client does not need

    console.rule('1. Five services')
    begin = time.monotonic()
    running = StackState.load(state_dir)
    if running is not None and running.is_running():
        raise SystemExit(f'{state_dir} is used by another quick start; wait for it, or give another --state-dir')
    stack = None
    try:
        resolve_model(model)
        with console.status('the services load the model') as status:
            options = StackOptions(state_dir=state_dir, base_model=model)
            stack = start_stack(options, report=lambda service, event: status.update(f'{service} is {event}'))
        for service in stack.services:
            console.print(f'  {service.name:<11} {service.address}  pid {service.pid}', highlight=False)
        console.print(f'  up after {time.monotonic() - begin:.1f} s')
        yield stack
    except (HubError, StackError) as error:
        raise SystemExit(f'quickstart: {error}') from None
    finally:
        if stack is not None:
            stop_stack(state_dir, report=_ignore_report)


def _show_dtype(client: TwinkleClient, facts: Facts) -> None:
    """Print the data type that the model service and the sampler chose for the base model."""
    described = [model for service in client.get_server_info().services for model in service.base_models]
    facts.dtypes = sorted({model.dtype for model in described if model.dtype})
    console.print(f'  base model in {" and ".join(facts.dtypes)}')


def _teach(
    client: TwinkleClient, model_id: str, steps: int, facts: Facts, *, names: Sequence[str], folder: Path
) -> None:
    sampler = Sampler(model_id, client=client)
    console.rule('2. Before')
    before = _ask(sampler, facts)
    facts.before = [answer.decoded for answer in before]
    console.rule('3. Training')
    model = MultiLoraTransformersModel(model_id, client=client)
    config = LoraConfig(r=8, lora_alpha=16, target_modules='all-linear', seed=1)
    facts.run_id = model.add_adapter_to_model('quickstart', config, user_metadata={'name': 'quick start'})
    # The console shows the answers of the first and the last step side by side.
    groups = [EVALUATION] * len(QUESTIONS)
    model.rollouts().log(before, step=0, groups=groups)
    model.set_optimizer('AdamW', lr=2e-3)
    model.set_lr_scheduler('CosineWarmupScheduler', num_warmup_steps=2, num_training_steps=steps + 2)
    loader = DataLoader(_dataset(client, model_id), batch_size=BATCH_SIZE, shuffle=True, seed=0, epochs=0)
    # The services store the numbers with the run; `--track` adds other trackers.
    with open_tracker(['service', *names], metrics=model.metrics(), project='quickstart') as tracker:
        _train(model, loader, steps, facts, tracker=tracker)
    facts.stored_losses = model.metrics().get(['loss'])['loss'].point_count
    _trace_last_step(model, loader, sampler, facts)
    console.rule('4. After')
    after = _ask(sampler, facts, version=facts.version)
    facts.after = [answer.decoded for answer in after]
    model.rollouts().log(after, step=steps, groups=groups)
    facts.checkpoint_path = model.save('final', overwrite=True)
    facts.folder = str(client.download_checkpoint(facts.checkpoint_path, folder / facts.run_id))
    console.print(f'run {facts.run_id}, version {facts.version}, loss {facts.first_loss:.2f} -> {facts.last_loss:.3f}')
    console.print(f'trained {facts.trained_tokens_per_second:.0f} tokens/s')
    console.print(f'sampled {facts.sampled_tokens_per_second:.0f} tokens/s')
    console.print(f'peft folder: {facts.folder}', soft_wrap=True, highlight=False)


def _dataset(client: TwinkleClient, model_id: str) -> Dataset:
    dataset = Dataset(DatasetMeta(str(DATA), data_slice=range(EXAMPLES)), client=client)
    dataset.set_template('Template', model_id=model_id, max_length=256)
    dataset.map('SelfCognitionProcessor', init_args={'model_name': NAME, 'model_author': AUTHOR})
    dataset.encode()
    console.print(f'  {len(dataset)} examples about the name of the model')
    return dataset


def _train(
    model: MultiLoraTransformersModel, loader: DataLoader, steps: int, facts: Facts, *, tracker: Tracker
) -> None:
    """Train all steps but the last, with a progress bar."""
    columns = (
        TextColumn('  {task.description}'),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn('{task.fields[numbers]}'),
        TimeElapsedColumn(),
    )
    tokens, begin = 0, time.monotonic()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task('steps', total=steps, numbers='')
        for batch in loader:
            output = model.forward_backward(batch)
            model.clip_grad_and_step(1.0)
            tokens += sum(len(feature['input_ids']) for feature in batch)
            loss = output['loss']
            facts.first_loss, facts.last_loss = facts.first_loss or loss, loss
            facts.trained_tokens_per_second = tokens / (time.monotonic() - begin)
            numbers = {'loss': loss, 'tokens_per_second': facts.trained_tokens_per_second}
            tracker.log(numbers, step=int(progress.tasks[task].completed))
            progress.update(task, advance=1, numbers=f'loss {loss:.3f}  {facts.trained_tokens_per_second:.0f} tokens/s')
            if progress.tasks[task].completed >= steps - 1:
                break


def _trace_last_step(model: MultiLoraTransformersModel, loader: DataLoader, sampler: Sampler, facts: Facts) -> None:
    """Run the last step, publish its weights and sample with them, in one trace."""
    loader.resume_from_checkpoint(loader.get_state())
    batch = next(iter(loader))
    with trace.get_tracer('examples').start_as_current_span('one step, published and sampled') as span:
        facts.trace_id = f'{span.get_span_context().trace_id:032x}'
        model.forward_backward(batch)
        model.clip_grad_and_step(1.0)
        facts.version = model.publish_version()
        params = {'max_tokens': 4, 'temperature': 0.0}
        wait = timedelta(seconds=30)
        sampler.sample(_chat(QUESTIONS[0]), params, 'quickstart', version=facts.version, wait=wait)


def _ask(sampler: Sampler, facts: Facts, *, version: int | None = None) -> list[SampledSequence]:
    """Ask all questions concurrently, show the answers as they arrive, and return them with their tokens.

    With a version, the table also shows the base model's answers.
    """
    answers = ['' for _ in QUESTIONS]
    target: dict[str, Any] = {} if version is None else {'adapter_name': 'quickstart', 'version': version}
    begin = time.monotonic()

    async def follow(index: int, live: Live) -> SampledSequence:
        deltas: list[SampleDelta] = []
        params = {'max_tokens': 32, 'temperature': 0.0}
        async for delta in sampler.sample_stream.aio(_chat(QUESTIONS[index]), params, **target):
            deltas.append(delta)
            answers[index] += delta.text
            live.update(_answer_table(answers, facts, version))
        return _sequence(QUESTIONS[index], deltas)

    async def follow_all(live: Live) -> list[SampledSequence]:
        return await asyncio.gather(*(follow(index, live) for index in range(len(QUESTIONS))))

    with Live(_answer_table(answers, facts, version), console=console, refresh_per_second=8, transient=True) as live:
        sequences = asyncio.run(follow_all(live))
    console.print(_answer_table(answers, facts, version))
    facts.sampled_tokens_per_second = sum(len(each.tokens) for each in sequences) / (time.monotonic() - begin)
    return sequences


def _sequence(question: str, deltas: Sequence[SampleDelta]) -> SampledSequence:
    """Return the parts of a streamed answer as one completion of the question."""
    tokens = [token for delta in deltas for token in delta.tokens]
    text = ''.join(delta.text for delta in deltas)
    version = max(delta.version or 0 for delta in deltas)
    return SampledSequence(
        stop_reason=deltas[-1].stop_reason or StopReason.ERROR,
        tokens=tokens,
        logprobs=[logprobs for delta in deltas for logprobs in delta.logprobs],
        decoded=text,
        version_spans=[VersionSpan(version=version, begin_token=0, end_token=len(tokens))],
        new_input_feature={'messages': [*_chat(question)['messages'], {'role': 'assistant', 'content': text}]},
    )


def _answer_table(answers: list[str], facts: Facts, version: int | None) -> Table:
    table = Table(expand=True)
    table.add_column('question', ratio=1)
    table.add_column('before' if version is not None else 'base model', ratio=2)
    if version is None:
        for question, answer in zip(QUESTIONS, answers, strict=True):
            table.add_row(question, escape(answer))
        return table
    table.add_column(f'after (version {version})', ratio=2)
    for question, old, new in zip(QUESTIONS, facts.before, answers, strict=True):
        table.add_row(question, escape(old), f'[green]{escape(new)}[/green]')
    return table


def _chat(question: str) -> dict[str, Any]:
    return {'messages': [{'role': 'user', 'content': question}]}


def _show_trace(folder: Path, facts: Facts) -> None:
    """Show the trace once all expected services have written spans, or after a time limit."""
    console.rule('5. One step, published and sampled, as a trace')
    expected = {'client', 'gateway', 'model', 'checkpoint', 'sampler'}
    end = time.monotonic() + SPAN_LIMIT_SECONDS
    spans = list(read_spans(folder, trace_id=facts.trace_id))
    while not expected <= {span.service for span in spans} and time.monotonic() < end:
        time.sleep(0.2)
        spans = list(read_spans(folder, trace_id=facts.trace_id))
    facts.traced_services = sorted({span.service for span in spans})
    console.print(Group(waterfall(spans)) if spans else 'no spans were written')


def _show_peft(model: str, facts: Facts) -> None:
    """Load the folder with plain transformers and peft in another process."""
    console.rule('6. The same adapter in plain peft')
    if importlib.util.find_spec('peft') is None:
        console.print('skipped: peft is not installed')
        return
    command = [sys.executable, '-m', 'examples.load_in_peft', facts.folder, '--model', model, '--ask', QUESTIONS[0]]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    facts.peft_answer = result.stdout.strip()
    console.print(f'{QUESTIONS[0]}  [green]{escape(facts.peft_answer)}[/green]')


def _show_console(stack: StackState, run_id: str) -> None:
    """Print a link to the run in the console, and wait for Ctrl-C."""
    with suppress(KeyboardInterrupt):
        console.rule('7. The run in your browser')
        print_console_link(stack, page=f'runs/{run_id}')
        console.print('The page has the curves, the answers before and after, and the traces. Press Ctrl-C to stop.')
        signal.pause()


def _ignore_report(service: str, event: str) -> None:
    del service, event


def _interrupt(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise KeyboardInterrupt


if __name__ == '__main__':
    main()
