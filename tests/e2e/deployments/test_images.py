"""The images of deploy/Containerfile are built and serve, with base images from Debian's packages."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from fixtures import containerfile
from fixtures.images import ADDRESS, PROGRAMS, base_images, build, serving_image
from fixtures.service_configs import SERVICES
from fixtures.tiny_model import build_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]


@pytest.fixture(scope='module')
def bases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Base images; without the programs that make them, tests fail in CI and are skipped elsewhere."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing or os.geteuid() != 0:
        fail_or_skip = pytest.fail if os.environ.get('CI') else pytest.skip
        fail_or_skip(f'run as root, and install the packages: {" ".join(missing)}')
    with base_images(tmp_path_factory.mktemp('bases')) as names:
        yield names


@pytest.mark.parametrize('service', SERVICES)
def test_image_serves(service: str, bases: tuple[str, str], tmp_path: Path) -> None:
    """An ordinary user builds and runs an image; its default command becomes ready, and its health check succeeds."""
    image = build(service, bases)
    prefix = f'TWINKLE_{service.upper()}'
    variables = [f'{prefix}_INTERNAL_TOKEN=a-token-of-the-services']
    if service in {'model', 'sampler'}:
        variables += [f'{prefix}_BASE_MODEL=/models/tiny', f'{prefix}_CHECKPOINT_ADDRESS=127.0.0.1:7105']
    model = build_tiny_model(tmp_path / 'tiny')
    for path in (model, *model.iterdir()):
        path.chmod(0o755)
    with serving_image(image, variables, model=model, log=tmp_path / 'log') as inside:
        (check,) = containerfile.inherited(service, 'HEALTHCHECK')
        subprocess.run([*inside, *json.loads(check.partition(' CMD ')[2])], check=True)
        user = subprocess.run([*inside, 'id', '-u'], check=True, capture_output=True, text=True)
        assert user.stdout.strip() == '10001'
        if service == 'gateway':
            with urlopen(f'http://{ADDRESS}:8080/console/') as response:
                assert b'<script' in response.read()
