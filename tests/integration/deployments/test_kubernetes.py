"""The manifests are valid objects of Kubernetes, start the services, and allow only the calls between them."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from fixtures import containerfile, manifests
from fixtures.certificates import make_authority
from fixtures.service_configs import SERVICES, config_class, loaded_config
from fixtures.source_tree import ROOT
from twinkle_services.kit.config import ServiceConfig
from twinkle_services.kit.telemetry import measures

FOLDER = ROOT / 'deploy/kubernetes'
VERSIONS = ['1.30', '1.37']
"""The oldest and the newest version of Kubernetes that the manifests support."""
EXTENSIONS = ('cert-manager.io/',)
"""Groups of objects that are not part of Kubernetes."""
SECRETS = {
    'internal-token': 'a-token-of-the-services',
    'api-key': 'tml-0123456789abcdef0123456789',
    'key-pepper': 'ab' * 32,
    'database-url': 'postgresql://twinkle:secret@database/twinkle',
    's3-access-key': 'twinkle',
    's3-secret-key': 'secret',
    's3-endpoint': 'https://objects',
}


@pytest.mark.parametrize('version', VERSIONS)
def test_objects_match_the_schemas(version: str) -> None:
    """Every object matches the strict schema of its kind, which refuses unknown fields."""
    checked = [item for item in manifests.objects() if not item['apiVersion'].startswith(EXTENSIONS)]
    for item in checked:
        kubernetes_validate.validate(item, version, strict=True)
    assert len(checked) > 20


def test_a_misspelled_field_does_not_match_the_schemas() -> None:
    """The schemas refuse an unknown field of a pod."""
    item = yaml.safe_load(yaml.safe_dump(manifests.workload('model')))
    item['spec']['template']['spec']['enableServiceLink'] = False
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(item, VERSIONS[0], strict=True)


def test_kubectl_renders_the_base() -> None:
    """`kubectl kustomize` renders all objects in the namespace, with images of the registry and the settings."""
    kubectl = shutil.which('kubectl')
    if kubectl is None:
        pytest.skip('kubectl is missing; Debian has no version that renders kustomizations with lists of files')
    done = subprocess.run([kubectl, 'kustomize', manifests.BASE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rendered = list(yaml.safe_load_all(done.stdout))
    assert len(rendered) == len(manifests.objects()) + 1
    assert {item['metadata'].get('namespace') for item in rendered if item['kind'] != 'Namespace'} == {'twinkle'}
    (settings,) = (item['data'] for item in rendered if item['kind'] == 'ConfigMap')
    assert settings == manifests.shared_settings()
    pods = [item['spec']['template']['spec'] for item in rendered if item['kind'] in {'StatefulSet', 'Deployment'}]
    images = {container['image'] for pod in pods for container in pod['containers']}
    assert images == {f'registry.example.com/twinkle-{service}:0.1.0' for service in SERVICES}


@pytest.mark.parametrize('service', SERVICES)
def test_variables_of_a_pod_configure_its_service(service: str, tmp_path: Path) -> None:
    """The variables of the image, the ConfigMap and the Secret are a valid configuration with mutual TLS."""
    config = _config(service, tmp_path)
    assert config.peers() == {f'twinkle://{caller}' for caller in config_class(service).callers}
    (container,) = manifests.workload(service)['spec']['template']['spec']['containers']
    ports = {entry['name']: str(entry['containerPort']) for entry in container['ports']}
    assert config.admin_listen == f'0.0.0.0:{ports["admin"]}'
    assert {listener.address.rpartition(':')[2] for listener in config.listeners()} <= set(ports.values())
    assert str(config.state_dir) in {mount['mountPath'] for mount in container['volumeMounts']}
    spec = manifests.workload(service)['spec']['template']['spec']
    assert config.drain_seconds < spec['terminationGracePeriodSeconds']


@pytest.mark.parametrize('service', SERVICES)
def test_addresses_of_settings_are_those_of_pods(service: str, tmp_path: Path) -> None:
    """Every address that a service calls names a pod of a StatefulSet, at a port of its Service."""
    config = _config(service, tmp_path).model_dump(mode='json')
    addresses = re.findall(r"'([a-z]+-\d+)\.([a-z]+):(\d+)'", str(config))
    assert len(addresses) == {'gateway': 3, 'model': 2, 'sampler': 3, 'data': 0, 'checkpoint': 0}[service]
    for pod, domain, port in addresses:
        name, _, number = pod.rpartition('-')
        spec = manifests.workload(name)['spec']
        assert int(number) < spec['replicas']
        assert spec['serviceName'] == domain
        (found,) = (item for item in manifests.of_kind('Service') if item['metadata']['name'] == domain)
        assert int(port) in {entry['port'] for entry in found['spec']['ports']}


@pytest.mark.parametrize('service', SERVICES)
def test_pods_are_restricted(service: str) -> None:
    """A pod runs as the user of the image, without privileges, writable files or variables of service links."""
    pod = manifests.workload(service)['spec']['template']['spec']
    (container,) = pod['containers']
    assert pod['securityContext']['runAsUser'] == int(containerfile.inherited(service, 'USER')[-1].split(':')[0])
    assert pod['securityContext']['runAsNonRoot']
    assert container['securityContext']['readOnlyRootFilesystem']
    assert container['securityContext']['capabilities'] == {'drop': ['ALL']}
    assert pod['enableServiceLinks'] is False
    assert pod['automountServiceAccountToken'] is False


@pytest.mark.parametrize('callee', SERVICES)
def test_network_policies_follow_the_call_graph(callee: str) -> None:
    """The network policies let exactly those services call a service that its configuration trusts."""
    callers = set(config_class(callee).callers)
    rules = [rule for rule in _policy(callee)['ingress'] if 'from' in rule]
    assert {_selected(peer) for rule in rules for peer in rule['from']} == callers
    ports = {entry['port'] for rule in rules for entry in rule['ports']}
    for caller in SERVICES:
        outgoing = [
            {entry['port'] for entry in rule['ports']}
            for rule in _policy(caller)['egress']
            if callee in {_selected(peer) for peer in rule.get('to', [])}
        ]
        assert outgoing == ([ports] if caller in callers else [])


@pytest.mark.parametrize('service', SERVICES)
def test_certificates_name_their_services(service: str) -> None:
    """The certificate in a pod has the URI that callees trust and the DNS name that callers expect."""
    (found,) = (
        item['spec'] for item in manifests.of_kind('Certificate') if item['spec']['secretName'] == f'{service}-tls'
    )
    assert found['uris'] == [f'twinkle://{service}']
    assert service in found['dnsNames']
    assert {'server auth', 'client auth'} <= set(found['usages'])
    volumes = manifests.workload(service)['spec']['template']['spec']['volumes']
    assert found['secretName'] in {volume['secret']['secretName'] for volume in volumes if 'secret' in volume}


def test_only_payloads_of_futures_need_shared_storage() -> None:
    """The only volume that several pods mount contains the payloads of the gateways."""
    (claim,) = manifests.of_kind('PersistentVolumeClaim')
    assert claim['spec']['accessModes'] == ['ReadWriteMany']
    mounted = {
        service: [volume['name'] for volume in pod['volumes'] if 'persistentVolumeClaim' in volume]
        for service in SERVICES
        if (pod := manifests.workload(service)['spec']['template']['spec'])
    }
    assert {service: names for service, names in mounted.items() if names} == {'gateway': ['payloads']}
    payload_dir = manifests.shared_settings()['TWINKLE_GATEWAY_FUTURES__PAYLOAD_DIR']
    (container,) = manifests.workload('gateway')['spec']['template']['spec']['containers']
    assert {'name': 'payloads', 'mountPath': payload_dir} in container['volumeMounts']


def test_autoscaler_uses_a_recorded_metric() -> None:
    """The autoscaler selects a metric and a state that samplers record, and the adapter serves this metric."""
    (scaler,) = manifests.of_kind('HorizontalPodAutoscaler')
    (entry,) = scaler['spec']['metrics']
    metric = entry['pods']['metric']
    assert metric['name'] == measures.sequences.prometheus_name
    (label,) = measures.sequences.labels
    assert metric['selector']['matchLabels'][label.name] in label.values
    (rule,) = yaml.safe_load((FOLDER / 'prometheus-adapter.yaml').read_text())['rules']
    assert rule['seriesQuery'].startswith(f'{metric["name"]}{{')
    assert 'replicas' not in manifests.workload(scaler['spec']['scaleTargetRef']['name'])['spec']


def test_prometheus_accepts_its_configuration(tmp_path: Path) -> None:
    """Prometheus accepts the configuration, except the discovery of pods, which Debian's build lacks."""
    promtool = shutil.which('promtool')
    if promtool is None:
        fail_or_skip = pytest.fail if os.environ.get('CI') else pytest.skip
        fail_or_skip('promtool is missing; install Prometheus (for example: apt-get install prometheus)')
    document = yaml.safe_load((FOLDER / 'prometheus.yaml').read_text())
    (job,) = document['scrape_configs']
    assert job.pop('kubernetes_sd_configs') == [{'role': 'pod', 'namespaces': {'names': ['twinkle']}}]
    (tmp_path / 'prometheus.yaml').write_text(yaml.safe_dump(document))
    shutil.copy(ROOT / 'deploy/observability/alerts.yaml', tmp_path)
    command = [promtool, 'check', 'config', 'prometheus.yaml']
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _config(service: str, folder: Path) -> ServiceConfig:
    make_authority(folder)
    for suffix, name in {'crt': 'tls.crt', 'key': 'tls.key'}.items():
        shutil.copy(folder / f'{service}.{suffix}', folder / name)
    return loaded_config(service, manifests.environment(service, SECRETS, folder))


def _policy(service: str) -> Any:
    (found,) = (item for item in manifests.of_kind('NetworkPolicy') if item['metadata']['name'] == service)
    assert _selected(found['spec']) == service
    return found['spec']


def _selected(peer: Any) -> str:
    return peer['podSelector']['matchLabels'][manifests.NAME]
