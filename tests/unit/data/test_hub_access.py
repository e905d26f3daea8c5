"""Private datasets of hubs are read only if the configuration lists them."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from twinkle_services.data.backends.hub_rows import HubAccess
from twinkle_services.data.config import DataConfig


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
