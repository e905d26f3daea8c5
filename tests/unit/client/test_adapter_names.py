"""Resolution of adapter names when several model handles assign names."""

import pytest

from twinkle_client.adapter_names import AdapterNames


class Handle:
    """An object that assigns names."""


def test_name_refers_to_the_latest_adapter_of_its_handle() -> None:
    """A name refers to its latest adapter; an unknown name is treated as an adapter id."""
    names, handle = AdapterNames(), Handle()
    names.add(handle, 'default', 'ad-1', base_model='tiny')
    names.add(handle, 'default', 'ad-2', base_model='tiny')
    assert names.find('default') == 'ad-2'
    assert names.find('ad-9') == 'ad-9'


def test_handles_have_separate_names() -> None:
    """A name that two handles use is ambiguous and refused until one of the handles removes it."""
    names, first, second = AdapterNames(), Handle(), Handle()
    names.add(first, 'default', 'ad-1', base_model='tiny')
    names.add(second, 'default', 'ad-2', base_model='tiny')
    with pytest.raises(ValueError, match='ad-1, ad-2'):
        names.find('default', base_model='tiny')
    names.remove(second, 'ad-2')
    assert names.find('default', base_model='tiny') == 'ad-1'


def test_synced_adapter_resolves_an_ambiguous_name() -> None:
    """An ambiguous name resolves to the synced candidate; several synced candidates are refused."""
    names, handles = AdapterNames(), [Handle(), Handle()]
    for number, handle in enumerate(handles):
        names.add(handle, 'default', f'ad-{number}', base_model='tiny')
    assert names.find('default', preferred=['ad-1', 'ad-7']) == 'ad-1'
    with pytest.raises(ValueError, match='default'):
        names.find('default', preferred=['ad-0', 'ad-1'])


def test_adapters_of_the_base_model_come_first() -> None:
    """A name refers to an adapter of the sampler's base model if there is one, else to an adapter of another model."""
    names, first, second = AdapterNames(), Handle(), Handle()
    names.add(first, 'default', 'ad-1', base_model='tiny')
    names.add(second, 'default', 'ad-2', base_model='large')
    assert [names.find('default', base_model=model) for model in ('tiny', 'large')] == ['ad-1', 'ad-2']
    names.remove(second, 'ad-2')
    assert names.find('default', base_model='large') == 'ad-1'


def test_deleted_handle_loses_its_name_to_a_live_handle() -> None:
    """The names of a deleted handle still resolve until another handle assigns the same name."""
    names, deleted = AdapterNames(), Handle()
    names.add(deleted, 'default', 'ad-1', base_model='tiny')
    del deleted
    assert names.find('default') == 'ad-1'
    handle = Handle()
    names.add(handle, 'default', 'ad-2', base_model='tiny')
    assert names.find('default') == 'ad-2'
