"""`twinkle console`: a one-time link to the console, the web app of a gateway."""

import webbrowser
from typing import Annotated

import typer

from twinkle_client.cli.session import LocalStateDirOption, fail
from twinkle_client.cli.session import console as terminal
from twinkle_client.console_link import ConsoleUnavailable, create_console_link
from twinkle_client.endpoint import Endpoint, find_console_endpoint
from twinkle_client.stack import StackState

HttpOption = Annotated[
    str,
    typer.Option(
        '--http', metavar='URL', help='HTTP address of the gateway. Default: TWINKLE_SERVER_URL, or the local stack.'
    ),
]


def console(
    http: HttpOption = '',
    open_browser: Annotated[bool, typer.Option('--open', help='Open the link in a browser.')] = False,
    state_dir: LocalStateDirOption = None,
) -> None:
    """Print a link that opens the console with your API key. The link can be used once, within ten minutes."""
    try:
        url = create_console_link(find_console_endpoint(http, state_dir))
    except (ConsoleUnavailable, ValueError) as error:
        fail(str(error))
    terminal.print(url, markup=False, highlight=False, soft_wrap=True)
    if open_browser and not webbrowser.open(url):
        fail('no browser could be opened; open the link in a browser of your choice')


def print_console_link(state: StackState, *, page: str = '') -> None:
    """Print a one-time link to the console of a local stack; print nothing if the stack has no console.

    Args:
        state: The running stack.
        page: Address of the page to show after the login, such as `runs/RUN`. Empty: the first page.
    """
    if not state.http_url:
        return
    try:
        url = create_console_link(Endpoint(state.http_url, state.read_api_key(), state.ca))
    except (ConsoleUnavailable, ValueError):
        return
    target = f'{url}/{page}' if page else url
    terminal.print(f'Console: {target}', markup=False, highlight=False, soft_wrap=True)
