"""The library's logger."""

import logging
import os
import sys


def get_logger(name: str = 'twinkle') -> logging.Logger:
    """Return a logger that writes to standard error, unless the program has configured logging itself.

    The environment variable `TWINKLE_LOG_LEVEL` sets the level; the default is INFO.

    Raises:
        ValueError: `TWINKLE_LOG_LEVEL` is not a level of `logging`.
    """
    logger = logging.getLogger(name)
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter('%(asctime)s %(levelname)s %(message)s', datefmt='%H:%M:%S'))
        logger.addHandler(handler)
        logger.propagate = False
        logger.setLevel(os.environ.get('TWINKLE_LOG_LEVEL', 'INFO').upper())
    return logger
