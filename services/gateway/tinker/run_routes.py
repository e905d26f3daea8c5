"""Lists of runs and checkpoints."""

from datetime import UTC

from services.gateway.catalogue.rules import Run
from services.gateway.catalogue.runs import Runs
from services.gateway.errors import RunNotFound
from services.gateway.http.call import HttpCall, JsonResponse, Response, Route
from services.gateway.tinker.catalogue_answers import checkpoint_to_json, cursor_to_json, run_to_json
from services.gateway.tinker.catalogue_ports import Browser, Keeper
from services.gateway.tinker.ports import Lookups
from services.gateway.tinker.queries import check_scope, query_of, slice_of
from services.gateway.tinker.routes import CATALOGUE, tinker_route
from services.kit.errors import DomainError
from services.kit.rpc.context import current_caller
from twinkle.api.model.v1 import adapter_pb2


class RunRoutes:
    """Serves them."""

    def __init__(self, browser: Browser, keeper: Keeper, *, runs: Runs, lookups: Lookups) -> None:
        """Read lists of `browser`, and single runs.

        Args:
            browser: reads the catalogue.
            keeper: knows the checkpoints of one run a moment before the catalogue does.
            runs: reads one run of the catalogue.
            lookups: knows a new model a moment before the catalogue does.
        """
        self._lookups = lookups
        self._browser = browser
        self._keeper = keeper
        self._runs = runs

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            tinker_route('training_runs', self._list_runs, access=CATALOGUE, http_method='GET'),
            tinker_route('training_runs/{run_id}', self._show_run, access=CATALOGUE, http_method='GET'),
            tinker_route(
                'training_runs/{run_id}/checkpoints', self._list_run_checkpoints, access=CATALOGUE, http_method='GET'
            ),
            tinker_route('checkpoints', self._list_checkpoints, access=CATALOGUE, http_method='GET'),
        ]

    async def _list_runs(self, call: HttpCall) -> Response:
        query = query_of(call)
        check_scope(query)
        part, tenant_id = slice_of(query, limit=20), current_caller().tenant_id
        found = await self._browser.runs(tenant_id, part, project_id=query.get('project_id', ''))
        checkpoints = await self._browser.checkpoints_of(tenant_id, [run.run_id for run in found.items])
        runs = [run_to_json(run, (item for item in checkpoints if item.run_id == run.run_id)) for run in found.items]
        return JsonResponse({'training_runs': runs, 'cursor': cursor_to_json(part, found)})

    async def _show_run(self, call: HttpCall) -> Response:
        check_scope(query_of(call))
        run = await self._find(call.path_values['run_id'])
        return JsonResponse(run_to_json(run, await self._browser.checkpoints_of(run.tenant_id, [run.run_id])))

    async def _list_run_checkpoints(self, call: HttpCall) -> Response:
        run_id = call.path_values['run_id']
        # Their owner is asked, not the copy: what was saved a moment ago is there.
        found = await self._keeper.list_of(run_id)
        if not found:
            await self._find(run_id)
        return JsonResponse({'checkpoints': [checkpoint_to_json(item) for item in found]})

    async def _find(self, run_id: str) -> Run:
        """Return a run of the caller.

        Raises:
            RunNotFound: it has none of that id.
        """
        try:
            return await self._runs.get(current_caller(), run_id)
        except RunNotFound as error:
            try:
                adapter = adapter_pb2.Adapter.FromString(await self._lookups.adapter(run_id))
            except DomainError:
                raise error from None
            return _run_of(adapter)

    async def _list_checkpoints(self, call: HttpCall) -> Response:
        query = query_of(call)
        check_scope(query)
        part = slice_of(query, limit=100)
        found = await self._browser.checkpoints(current_caller().tenant_id, part)
        checkpoints = [checkpoint_to_json(item) for item in found.items]
        return JsonResponse({'checkpoints': checkpoints, 'cursor': cursor_to_json(part, found)})


def _run_of(adapter: adapter_pb2.Adapter) -> Run:
    return Run(
        run_id=adapter.adapter_id,
        tenant_id=current_caller().tenant_id,
        base_model=adapter.base_model,
        lora_rank=adapter.lora_config.lora_rank,
        step_count=adapter.step_count,
        version=adapter.version,
        user_metadata=dict(adapter.user_metadata),
        is_active=True,
        create_time=adapter.create_time.ToDatetime(tzinfo=UTC),
        update_time=adapter.update_time.ToDatetime(tzinfo=UTC),
    )
