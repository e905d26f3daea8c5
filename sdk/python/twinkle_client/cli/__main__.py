"""`python -m twinkle_client.cli`: the command line without its installed script."""

from twinkle_client.cli.app import app

app()
