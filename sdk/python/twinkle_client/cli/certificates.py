"""`twinkle certs`: a private CA and a certificate for each service."""

from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from twinkle_client.cli.session import JsonOption, console, fail, print_json, print_table
from twinkle_client.stack import SERVICES, StackError
from twinkle_client.stack.certificates import MadeCertificate, make_certificates


def certs(
    folder: Annotated[Path, typer.Argument(help='Output folder; created with access for the current user only.')],
    host: Annotated[
        list[str] | None,
        typer.Option(
            '--host',
            help='Additional host name or address of the gateway, or SERVICE=NAME for another service. Repeatable.',
        ),
    ] = None,
    force: Annotated[bool, typer.Option('--force', help='Replace the service certificates; the CA is kept.')] = False,
    is_json: JsonOption = False,
) -> None:
    """Create a private CA and a certificate for each service.

    Existing certificates are listed too; they are kept unless --force is given.
    """
    hosts: dict[str, list[str]] = {}
    for text in host or ():
        service, is_given, name = text.rpartition('=')
        if is_given and service not in SERVICES:
            fail(f'--host {text}: unknown service {service!r}; services are {", ".join(SERVICES)}')
        hosts.setdefault(service or 'gateway', []).append(name)
    try:
        certificates = make_certificates(folder.absolute(), hosts, is_forced=force)
    except StackError as error:
        fail(str(error))
    if is_json:
        print_json([_certificate_json(item) for item in certificates])
        return
    print_table(certificate_table(certificates))
    console.print(f'Set for clients: TWINKLE_CA={certificates[0].path}', highlight=False, soft_wrap=True)
    console.print(f"Do not share the CA's private key: {certificates[0].path.with_suffix('.key')}", soft_wrap=True)


def _certificate_json(item: MadeCertificate) -> dict[str, object]:
    return {
        'path': str(item.path),
        'expires': item.expire_time.isoformat(),
        'is_new': item.is_new,
        'names': list(item.names),
    }


def certificate_table(certificates: list[MadeCertificate]) -> Table:
    """Return a table of certificates with their expiry and names."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column('file', no_wrap=True, min_width=max(len(item.path.name) for item in certificates))
    for name in ('expires', '', 'names'):
        table.add_column(name, overflow='fold')
    for item in certificates:
        expiry = f'{item.expire_time:%Y-%m-%d}'
        table.add_row(item.path.name, expiry, 'new' if item.is_new else 'kept', ' '.join(item.names))
    return table
