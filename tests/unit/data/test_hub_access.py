"""Private datasets and tokenizers of hubs are read only if the configuration lists them."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from pydantic import ValidationError

from fixtures.fake_hub import running_hub
from fixtures.tiny_templates import tiny_template
from twinkle_services.data.backends.hub_rows import HubAccess
from twinkle_services.data.backends.library import LibraryEngine
from twinkle_services.data.config import DataConfig
from twinkle_services.data.domain import DecodedBytes, DecodedLimits, HubIdNotFound, Table, TemplateStep
from twinkle_services.kit.worker import Threads


@pytest.mark.parametrize('dataset_id', ['org/rows', 'hf://org/rows', 'ms://org/rows'])
def test_private_datasets_are_listed_by_name_or_owner(dataset_id: str) -> None:
    """A dataset may be private if the list has its name, its owner, or `*`, with any prefix of its id."""
    for listed, is_allowed in (('org/rows', True), ('org', True), ('*', True), ('org/row', False), ('rows', False)):
        access = HubAccess(token_repositories=frozenset({listed}))
        assert access.is_private_allowed(dataset_id) == is_allowed
    assert not HubAccess().is_private_allowed(dataset_id)


@pytest.mark.parametrize('name', ['hf://org/rows', 'org/rows/more', '', '/org', 'org/*', '../org'])
def test_malformed_names_of_private_datasets_are_refused(tmp_path: Path, name: str) -> None:
    """A name that no dataset could have is an error of the configuration, and not a permission without effect."""
    assert DataConfig(state_dir=tmp_path, hub_token_repositories=('org/rows', 'org', '*'))
    with pytest.raises(ValidationError, match='must be org/name, org or'):
        DataConfig(state_dir=tmp_path, hub_token_repositories=('org', name))


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Private models 'org/deployed', 'org/listed' and 'org/other' in the cache of a client; 'mine' is an alias."""
    for name in ('deployed', 'listed', 'other'):
        repository = tmp_path / f'models--org--{name}'
        (repository / 'refs').mkdir(parents=True)
        (repository / 'refs' / 'main').write_text('c0ffee')
        (repository / 'snapshots' / 'c0ffee').mkdir(parents=True)
        tiny_template(repository / 'snapshots' / 'c0ffee')
    with running_hub() as hub:
        aliases = 'mine=org/other'
        settings = {'HF_HUB_CACHE': tmp_path, 'HF_ENDPOINT': hub.url, 'TWINKLE_MODEL_ID_ALIASES': aliases}
        for variable, value in settings.items():
            monkeypatch.setenv(variable, str(value))
        yield


async def template_of(base_model: str, *, deployed: str = 'org/deployed') -> TemplateStep | None:
    """Return the template that a dataset has after a step names its base model."""
    limits = DecodedLimits(rows=10, dataset_bytes=1 << 20, tenant_bytes=1 << 20, total_bytes=1 << 20)
    decoded = DecodedBytes(limits)
    with closing(Threads('rows', count=1)) as threads, decoded.meter('alice') as meter:
        engine = LibraryEngine(
            threads, base_models=(deployed,), access=HubAccess(token_repositories=frozenset({'org/listed'})),
            template_cache=1, download_limit_bytes=1, decoded=decoded,
        )  # fmt: skip
        return (await engine.apply(Table(rows=[]), [TemplateStep(base_model=base_model)], meter)).template


@pytest.mark.usefixtures('cached')
async def test_templates_of_private_models_need_a_permission() -> None:
    """Tokenizers in the cache of a hub's client are used for listed models, base models and aliases only."""
    for base_model in ('org/deployed', 'hf://org/listed', 'mine'):
        assert await template_of(base_model) == TemplateStep(base_model=base_model)
    with pytest.raises(HubIdNotFound):
        await template_of('org/other')


@pytest.mark.usefixtures('cached')
@pytest.mark.parametrize('deployed', ['org/deployed', 'hf://org/deployed'])
@pytest.mark.parametrize('base_model', ['org/deployed', 'hf://org/deployed'])
async def test_base_models_have_names_with_and_without_a_hub(deployed: str, base_model: str) -> None:
    """A template may name a private base model in both forms, and then has the name in the configuration."""
    assert await template_of(base_model, deployed=deployed) == TemplateStep(base_model=deployed)
    with pytest.raises(HubIdNotFound):
        await template_of('hf://org/other', deployed=deployed)


@pytest.mark.usefixtures('cached')
async def test_base_models_of_another_hub_differ() -> None:
    """The name of a base model with another hub's prefix is a different model, which may not be private."""
    with pytest.raises(HubIdNotFound):
        await template_of('hf://org/deployed', deployed='ms://org/deployed')
