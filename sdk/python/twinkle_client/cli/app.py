"""The commands, put together."""

import typer

from twinkle_client.cli import catalogue, keys, models, planning, sampling, stack, traces

app = typer.Typer(
    name='twinkle',
    help='Train and sample language models through a Twinkle stack.',
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command('up')(stack.up)
app.command('status')(stack.status)
app.command('down')(stack.down)
app.command('sample')(sampling.sample)
app.command('estimate')(planning.estimate)
app.command('runs')(catalogue.runs)
app.command('checkpoints')(catalogue.checkpoints)
app.command('download')(catalogue.download)
app.command('trace')(traces.trace)
app.add_typer(models.app, name='models')
app.add_typer(keys.app, name='keys')
