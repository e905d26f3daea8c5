"""The command line interface `twinkle`."""

from twinkle_client.cli.app import app

__all__ = ['app']
