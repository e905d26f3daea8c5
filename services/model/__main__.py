"""Starts the model service: `python -m twinkle_services.model --config FILE`."""

import importlib
import os

from twinkle.infra import is_first_rank
from twinkle.infra.garbage import collections_paused
from twinkle.plugin import keep_plugins_out
from twinkle_services.kit.config import keep_files_private, load_config
from twinkle_services.kit.errors import BaseModelNotFound
from twinkle_services.kit.telemetry import serving_admin, start_telemetry, stop_telemetry
from twinkle_services.kit.telemetry.event_loop import run_service
from twinkle_services.model.backends.journal.schema import JournalRefused
from twinkle_services.model.config import ModelConfig
from twinkle_services.model.domain.errors import JournalUnavailable

_ASSEMBLY = 'twinkle_services.model.assembly'
"""Module that assembles the service. Its import loads torch, which takes seconds."""


def main() -> None:
    """Run the service until SIGINT or SIGTERM. The other processes of a mesh only repeat the calls of the first one.

    Raises:
        SystemExit: The configuration is invalid, the model cannot be loaded, the journal cannot be used, a journaled
            adapter has a different base model, or the server cannot listen; the message states the cause.
    """
    keep_plugins_out()
    keep_files_private()
    config = load_config(ModelConfig)
    if config.gpus:
        # The first use of CUDA reads the variable.
        os.environ['CUDA_VISIBLE_DEVICES'] = ','.join(config.gpus)
    if not is_first_rank():
        with collections_paused():
            assembly = importlib.import_module(_ASSEMBLY)
        assembly.repeat_calls(config)
        return
    start_telemetry(config.telemetry, service=config.service)
    try:
        with serving_admin(config.admin_address(), service=config.service) as readiness:
            with readiness.step('import the libraries'), collections_paused():
                assembly = importlib.import_module(_ASSEMBLY)
            run_service(assembly.serve(config, readiness))
    except (BaseModelNotFound, JournalRefused) as error:
        raise SystemExit(f'twinkle-model: {error}') from error
    except JournalUnavailable as error:
        text = f'the journal in {config.state_dir} cannot be read or written: {error.__cause__ or error}'
        raise SystemExit(f'twinkle-model: {text}') from error
    finally:
        stop_telemetry()


if __name__ == '__main__':
    main()
