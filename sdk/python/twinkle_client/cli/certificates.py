"""`twinkle certs`: an authority of one's own and a certificate for each service, for development."""

from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from twinkle_client.cli.session import console, fail
from twinkle_client.stack import SERVICES, StackError
from twinkle_client.stack.certificates import MadeCertificate, make_certificates


def certs(
    folder: Annotated[Path, typer.Argument(help='Where; made if need be, readable for you alone.')],
    host: Annotated[
        list[str] | None,
        typer.Option(
            '--host', help='Name or address that clients call the gateway by; SERVICE=NAME for another service. Repeat.'
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option('--force', help="Make the services' certificates anew, by the authority that is there.")
    ] = False,
) -> None:
    """Make certificates for a deployment of your own; what is there is kept, and shown."""
    hosts: dict[str, list[str]] = {}
    for text in host or ():
        service, is_given, name = text.rpartition('=')
        if is_given and service not in SERVICES:
            fail(f'--host {text}: no service is called {service!r}; there are {", ".join(SERVICES)}')
        hosts.setdefault(service or 'gateway', []).append(name)
    try:
        made = make_certificates(folder.absolute(), hosts, is_forced=force)
    except StackError as error:
        fail(str(error))
    console.print(certificate_table(made))
    console.print(f'clients: TWINKLE_CA={made[0].path}', highlight=False, soft_wrap=True)
    console.print(f'keep secret: {made[0].path.with_suffix(".key")} signs for all of them', soft_wrap=True)


def certificate_table(made: list[MadeCertificate]) -> Table:
    """Return certificates with what they are for and when they end."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ('file', 'ends', '', 'for'):
        table.add_column(name, overflow='fold')
    for item in made:
        ends = f'{item.expire_time:%Y-%m-%d}'
        table.add_row(item.path.name, ends, 'new' if item.is_new else 'kept', ' '.join(item.names))
    return table
