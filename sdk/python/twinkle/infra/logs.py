"""The library's logger."""

import logging
import os
import sys

from twinkle.infra.launcher import is_first_rank


def get_logger(name: str = 'twinkle') -> logging.Logger:
    """Return a logger that writes to standard error, unless the program has configured logging itself.

    The environment variable `TWINKLE_LOG_LEVEL` sets the level. The default is INFO; in a program of several processes,
    processes other than the first log only warnings and errors.

    Raises:
        ValueError: `TWINKLE_LOG_LEVEL` is not a level of `logging`, or `WORLD_SIZE` is not a number.
    """
    logger = logging.getLogger(name)
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter('%(asctime)s %(levelname)s %(message)s', datefmt='%H:%M:%S'))
        logger.addHandler(handler)
        logger.propagate = False
        default = 'INFO' if is_first_rank() else 'WARNING'
        logger.setLevel(os.environ.get('TWINKLE_LOG_LEVEL', default).upper())
    return logger
