"""Programs without generated code find and call the gateway's own and the forwarded services by reflection."""

import asyncio
import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, message_factory
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha import reflection_pb2

from fixtures.running_gateway import ADMIN, ADMIN_KEY, RunningGateway
from twinkle.api.model.v1 import adapter_service_pb2, adapter_service_pb2_grpc
from twinkle_services.gateway.forwarding.open import FORWARDED

BUF = Path(sys.executable).parent / 'buf'
VERSIONS = ['v1', 'v1alpha']
ADAPTERS = 'twinkle.api.model.v1.AdapterService'
FORWARDED_NAMES = {service.full_name for services in FORWARDED.values() for service in services}
OWN_NAMES = {
    'grpc.health.v1.Health',
    'grpc.reflection.v1.ServerReflection',
    'grpc.reflection.v1alpha.ServerReflection',
    'twinkle.api.gateway.v1.CatalogueService',
    'twinkle.api.gateway.v1.KeyService',
    'twinkle.api.sampler.v1.SamplerService',
    'twinkle.api.server.v1.ServerService',
}
"""Some services that the gateway serves itself."""


class Reflection:
    """A reflection client that knows nothing about the services; its descriptors have a separate pool."""

    def __init__(self, channel: grpc.aio.Channel, version: str) -> None:
        self._call: Any = channel.stream_stream(
            f'/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo',
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )()
        self._pool = DescriptorPool()
        self._files: set[str] = set()

    async def ask(self, **question: str) -> reflection_pb2.ServerReflectionResponse:
        await self._call.write(reflection_pb2.ServerReflectionRequest(**question))
        return await self._call.read()

    async def services(self) -> set[str]:
        """Return the names of all services."""
        response = await self.ask(list_services='')
        return {service.name for service in response.list_services_response.service}

    async def service(self, name: str) -> Any:
        """Return the descriptor of a service."""
        response = await self.ask(file_containing_symbol=name)
        contents = response.file_descriptor_response.file_descriptor_proto
        files = {file.name: file for file in map(descriptor_pb2.FileDescriptorProto.FromString, contents)}
        for file in files:
            self._add(file, files)
        return self._pool.FindServiceByName(name)

    def close(self) -> None:
        self._call.cancel()

    def _add(self, name: str, files: dict[str, descriptor_pb2.FileDescriptorProto]) -> None:
        """Add a file to the pool after those that it imports."""
        if name not in self._files:
            self._files.add(name)
            for imported in files[name].dependency:
                self._add(imported, files)
            self._pool.AddSerializedFile(files[name].SerializeToString())


async def _connect(gateway: RunningGateway) -> None:
    """Wait until the gateway has reached the service behind it."""
    adapters = adapter_service_pb2_grpc.AdapterServiceStub(gateway.channel)
    while True:
        with suppress(grpc.aio.AioRpcError):
            await adapters.GetAdapter(adapter_service_pb2.GetAdapterRequest(adapter_id='a'), metadata=ADMIN)
            return


@pytest.mark.parametrize('version', VERSIONS)
async def test_forwarded_services_are_listed(gateway: RunningGateway, version: str) -> None:
    """The list contains the gateway's own services and the forwarded ones, but no service for weights."""
    client = Reflection(gateway.channel, version)
    names = await client.services()
    assert names >= OWN_NAMES | FORWARDED_NAMES
    assert 'twinkle.api.checkpoint.v1.WeightStreamService' not in names
    client.close()


@pytest.mark.parametrize('version', VERSIONS)
async def test_every_listed_service_is_described(gateway: RunningGateway, version: str) -> None:
    """The file of each listed service and the files that it imports can be read."""
    client = Reflection(gateway.channel, version)
    names = await client.services()
    described = [await client.service(name) for name in sorted(names)]
    assert [service.full_name for service in described] == sorted(names)
    assert all(service.methods for service in described)
    assert (await client.ask(file_containing_symbol='twinkle.Nothing')).error_response.error_code == 5
    client.close()


@pytest.mark.parametrize('version', VERSIONS)
async def test_a_forwarded_method_is_called_by_its_description(gateway: RunningGateway, version: str) -> None:
    """A client that builds its messages from reflected descriptors can call a service behind the gateway."""
    await _connect(gateway)
    client = Reflection(gateway.channel, version)
    method = (await client.service(ADAPTERS)).methods_by_name['GetAdapter']
    request, response = map(message_factory.GetMessageClass, (method.input_type, method.output_type))
    call: Any = gateway.channel.unary_unary(
        f'/{ADAPTERS}/GetAdapter',
        request_serializer=request.SerializeToString,
        response_deserializer=response.FromString,
    )
    assert (await call(request(adapter_id='a'), metadata=ADMIN)).adapter.adapter_id == 'a'
    client.close()


@pytest.mark.parametrize('version', VERSIONS)
async def test_buf_curl_finds_forwarded_services(gateway: RunningGateway, version: str, tmp_path: Path) -> None:
    """A client from another project lists the services, and calls a forwarded method, in each reflection version."""

    def curl(*arguments: str) -> str:
        protocol = f'--reflect-protocol=grpc-{version}'
        command = [BUF, 'curl', '--protocol=grpc', '--http2-prior-knowledge', protocol, *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    await _connect(gateway)
    url = f'http://{gateway.address}'
    listed = await asyncio.to_thread(curl, '--list-services', url)
    assert set(listed.split()) >= OWN_NAMES | FORWARDED_NAMES
    key, data = f'--header=authorization: Bearer {ADMIN_KEY}', '--data={"adapterId": "a"}'
    answer = await asyncio.to_thread(curl, key, data, f'{url}/{ADAPTERS}/GetAdapter')
    assert json.loads(answer)['adapter']['adapterId'] == 'a'
