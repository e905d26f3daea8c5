"""Entry point of `python -m twinkle_client.cli`."""

from twinkle_client.cli.app import app

app()
