"""The command line: `twinkle up`, `status`, `sample`, `runs`, `trace`, `down` and others."""

from twinkle_client.cli.app import app

__all__ = ['app']
