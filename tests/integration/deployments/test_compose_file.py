"""The compose file, its images and the files that it mounts fit together."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from compose_spec import PyCompose

from fixtures import containerfile
from fixtures.compose_run import variables
from fixtures.composed import COMPOSE_FILE, Container, compose_document, containers
from fixtures.service_configs import SERVICES, loaded_config
from fixtures.source_tree import ROOT

OURS = ['gateway-1', 'gateway-2', 'model', 'sampler-1', 'sampler-2', 'data', 'checkpoint']
VARIABLES = variables(Path('/models'))


def test_file_matches_the_specification() -> None:
    """The file matches the Compose specification, which refuses unknown fields and undefined networks and volumes."""
    document = compose_document(VARIABLES)
    PyCompose.from_yaml(yaml.safe_dump(document)).validate()
    document['services']['model']['read_onli'] = True
    with pytest.raises(ValueError, match='read_onli'):
        PyCompose.from_yaml(yaml.safe_dump(document))


@pytest.mark.parametrize('name', OURS)
def test_container_starts_with_its_configuration(name: str) -> None:
    """The variables of image and file, and the mounted example, are a valid configuration of the service."""
    container = containers(VARIABLES)[name]
    config = loaded_config(container.target, container.environment, _arguments(container))
    assert config.internal_token == VARIABLES['TWINKLE_INTERNAL_TOKEN']
    assert config.admin_listen == '0.0.0.0:9100'
    places = {*container.tmpfs, *(mount.target for mount in container.mounts)}
    assert str(config.state_dir) in places


@pytest.mark.parametrize('name', OURS)
def test_addresses_name_containers(name: str) -> None:
    """Every address that a container calls is that of another container, at the port on which its service listens."""
    found = containers(VARIABLES)
    container = found[name]
    loaded = loaded_config(container.target, container.environment, _arguments(container)).model_dump(mode='json')
    addresses = [loaded.get('checkpoint_address', ''), loaded.get('data_address', ''), *loaded.get('gateways', ())]
    addresses += [value for value in loaded.get('upstreams', {}).values() if isinstance(value, str)]
    for host, _, port in (address.partition(':') for address in addresses if address):
        callee = found[host]
        config = loaded_config(callee.target, callee.environment, _arguments(callee))
        assert config.listen == f'0.0.0.0:{port}'


@pytest.mark.parametrize('name', sorted(containers(VARIABLES)))
def test_mounts_and_variables_are_complete(name: str) -> None:
    """Every mounted file exists, every named volume is declared, and every variable has a value."""
    document = compose_document(VARIABLES)
    for mount in containers(VARIABLES)[name].mounts:
        if mount.path is None:
            assert mount.source in document['volumes']
        elif mount.path.is_relative_to(ROOT):
            assert mount.path.exists()
    assert '${' not in yaml.safe_dump(document['services'][name])


@pytest.mark.parametrize('name', sorted(set(VARIABLES) - {'TWINKLE_BASE_MODEL', 'TWINKLE_MODELS'}))
def test_missing_secret_is_refused(name: str) -> None:
    """The file cannot be used without a value of each secret."""
    with pytest.raises(LookupError, match=name):
        containers({key: value for key, value in VARIABLES.items() if key != name})


@pytest.mark.parametrize('target', containerfile.targets())
def test_images_are_unprivileged_and_checked(target: str) -> None:
    """An image runs its service as a user other than root, and its health check requests the admin port."""
    service = target.partition('-')[0]
    assert containerfile.command(target) == [f'twinkle-{service}']
    assert containerfile.inherited(target, 'USER')[-1] == '10001:10001'
    config = loaded_config(service, {**containerfile.environment(target), **_required(service)})
    host, _, port = config.admin_listen.partition(':')
    assert host == '0.0.0.0'
    (check,) = containerfile.inherited(target, 'HEALTHCHECK')
    assert f'http://127.0.0.1:{port}/readyz' in check
    folders = ' '.join(containerfile.inherited(target, 'RUN'))
    assert f' {config.state_dir} ' in f'{folders} '


def test_every_service_has_an_image() -> None:
    """The Containerfile has a target for each service, and a second target for the sampler with vLLM."""
    assert set(containerfile.targets()) == {*SERVICES, 'sampler-vllm'}
    services = compose_document(VARIABLES)['services'].values()
    used = {service['build']['target'] for service in services if 'build' in service}
    assert used == set(SERVICES)


def test_proxy_configuration_is_valid(tmp_path: Path) -> None:
    """HAProxy accepts the configuration once the names of the gateways are addresses."""
    haproxy = shutil.which('haproxy', path='/usr/sbin:/usr/local/sbin:/usr/bin')
    if haproxy is None:
        fail_or_skip = pytest.fail if os.environ.get('CI') else pytest.skip
        fail_or_skip('haproxy is missing; install it (for example: apt-get install haproxy)')
    text = (COMPOSE_FILE.parent / 'compose/haproxy.cfg').read_text()
    for name in ('gateway-1', 'gateway-2'):
        text = text.replace(f' {name}:', f' {containers(VARIABLES)[name].address}:')
    (tmp_path / 'haproxy.cfg').write_text(text)
    done = subprocess.run([haproxy, '-c', '-f', tmp_path / 'haproxy.cfg'], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_prometheus_scrapes_every_service() -> None:
    """Prometheus scrapes the admin port of each container of ours, in the job of its service."""
    document = yaml.safe_load((COMPOSE_FILE.parent / 'compose/prometheus.yaml').read_text())
    jobs = {
        target: job['job_name']
        for job in document['scrape_configs']
        for entry in job['static_configs']
        for target in entry['targets']
    }
    assert jobs == {f'{name}:9100': f'twinkle-{containers(VARIABLES)[name].target}' for name in OURS}


def test_collector_and_board_are_connected() -> None:
    """The pipelines of the collector use parts that its file defines, and Grafana reads the mounted dashboard."""
    folder = COMPOSE_FILE.parent / 'compose'
    collector = yaml.safe_load((folder / 'collector.yaml').read_text())
    for pipeline in collector['service']['pipelines'].values():
        for kind, names in pipeline.items():
            assert set(names) <= set(collector[kind])
    port = collector['receivers']['otlp']['protocols']['grpc']['endpoint'].rpartition(':')[2]
    found = containers(VARIABLES)
    for name in OURS:
        assert found[name].environment['OTEL_EXPORTER_OTLP_TRACES_ENDPOINT'] == f'http://otel-collector:{port}'
    (provider,) = yaml.safe_load((folder / 'grafana/dashboards/twinkle.yaml').read_text())['providers']
    boards = [mount for mount in found['grafana'].mounts if mount.target.startswith(provider['options']['path'])]
    assert [mount.path for mount in boards] == [ROOT / 'deploy/observability/dashboard.json']
    (source,) = yaml.safe_load((folder / 'grafana/datasources/prometheus.yaml').read_text())['datasources']
    assert source['url'].partition('//')[2].partition(':')[0] in found


def _arguments(container: Container) -> list[str]:
    """Return the arguments of the command, with paths of this machine instead of mounted ones."""
    assert container.command[0] == f'twinkle-{container.target}'
    folders = {mount.target: mount.path for mount in container.mounts if mount.path is not None}
    words = container.command[1:]
    return [str(folders['/etc/twinkle'] / Path(word).name) if word.startswith('/etc/') else word for word in words]


def _required(service: str) -> dict[str, str]:
    """Return variables for fields that every deployment sets."""
    model = {'TWINKLE_MODEL_CHECKPOINT_ADDRESS': 'checkpoint:7105', 'TWINKLE_MODEL_BASE_MODEL': 'org/name'}
    sampler = {'TWINKLE_SAMPLER_CHECKPOINT_ADDRESS': 'checkpoint:7105', 'TWINKLE_SAMPLER_BASE_MODEL': 'org/name'}
    return {'model': model, 'sampler': sampler}.get(service, {})
