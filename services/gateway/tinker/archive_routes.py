"""Saved weights to take away: links to the archive of a peft folder and to its files, and what they lead to."""

from email.utils import format_datetime
from urllib.parse import quote

from services.gateway.http.call import HttpCall, JsonResponse, Response, Route
from services.gateway.tinker.archives import FileResponse, contents_of
from services.gateway.tinker.catalogue_answers import moment_to_json
from services.gateway.tinker.catalogue_ports import Keeper
from services.gateway.tinker.errors import TinkerErrors
from services.gateway.tinker.links import Links, server_url
from services.gateway.tinker.paths import WeightsKind, path_of_native
from services.gateway.tinker.queries import path_of
from services.gateway.tinker.routes import CHECKPOINTS, PREFIX, tinker_route
from services.kit.caller import Caller
from services.kit.errors import CheckpointNotFound, InvalidField
from services.kit.rpc.context import current_caller

_ONE = 'training_runs/{run_id}/checkpoints/{kind}/{name}'
_FILES = f'{PREFIX}files/'


class ArchiveRoutes:
    """Serves them."""

    def __init__(self, keeper: Keeper, links: Links) -> None:
        """Read from `keeper`; `links` need no key."""
        self._keeper = keeper
        self._links = links

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            tinker_route(f'{_ONE}/archive', self._link_archive, access=CHECKPOINTS, http_method='GET'),
            tinker_route(f'{_ONE}/external_weights_urls', self._link_files, access=CHECKPOINTS, http_method='GET'),
            Route(
                path=f'{_FILES}{{token}}/{{name}}',
                http_method='GET',
                name='tinker.get.files',
                method=CHECKPOINTS,
                serve=self._send,
                errors=TinkerErrors(),
                identify=self._identify,
            ),
        ]

    async def _link_archive(self, call: HttpCall) -> Response:
        path = path_of(call)
        await self._keeper.get(path.native)
        token, expire_time = self._links.make(current_caller().tenant_id, path.native)
        url = f'{server_url(call)}{_FILES}{token}/{quote(path.name)}.tar'
        headers = {'location': url, 'expires': format_datetime(expire_time, usegmt=True)}
        return JsonResponse({'url': url, 'expires': moment_to_json(expire_time)}, 302, headers)

    async def _link_files(self, call: HttpCall) -> Response:
        path = path_of(call)
        if path.kind is not WeightsKind.EXTERNAL:
            raise InvalidField('path', f'must be of {WeightsKind.EXTERNAL}; save with save_weights_external')
        contents = await contents_of(self._keeper, path.native)
        urls: dict[str, str] = {}
        expires = ''
        for name in contents.files:
            token, expire_time = self._links.make(current_caller().tenant_id, path.native, name)
            urls[name] = f'{server_url(call)}{_FILES}{token}/{quote(name)}'
            expires = moment_to_json(expire_time)
        return JsonResponse({'urls': urls, 'expires': expires})

    async def _send(self, call: HttpCall) -> Response:
        link = self._links.read(call.path_values['token'])
        contents = await contents_of(self._keeper, link.path)
        span = contents.span_of(link.file)
        if span is None:
            raise CheckpointNotFound(link.path)
        name = link.file or f'{path_of_native(link.path).name}.tar'
        return FileResponse(self._keeper, link.path, span, name.replace('"', ''), contents.digest)

    def _identify(self, call: HttpCall) -> Caller:
        """Return who follows a link: the tenant that it was made for, to read weights and nothing else."""
        return Caller(tenant_id=self._links.read(call.path_values['token']).tenant_id)
