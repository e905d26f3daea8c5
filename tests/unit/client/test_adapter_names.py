"""What a name of an adapter means, where several model handles give names."""

import pytest

from twinkle_client.adapter_names import AdapterNames


class Handle:
    """Gives names."""


def test_a_name_means_what_its_handle_called_so_last() -> None:
    """What is no name is taken for an id."""
    names, handle = AdapterNames(), Handle()
    names.add(handle, 'default', 'ad-1', base_model='tiny')
    names.add(handle, 'default', 'ad-2', base_model='tiny')
    assert names.find('default') == 'ad-2'
    assert names.find('ad-9') == 'ad-9'


def test_handles_share_no_names() -> None:
    """A name of two is refused; each still finds its own once the other one has given the name up."""
    names, first, second = AdapterNames(), Handle(), Handle()
    names.add(first, 'default', 'ad-1', base_model='tiny')
    names.add(second, 'default', 'ad-2', base_model='tiny')
    with pytest.raises(ValueError, match='ad-1, ad-2'):
        names.find('default', base_model='tiny')
    names.remove(second, 'ad-2')
    assert names.find('default', base_model='tiny') == 'ad-1'


def test_an_adapter_that_was_synced_is_the_one_that_is_meant() -> None:
    """If there is exactly one."""
    names, handles = AdapterNames(), [Handle(), Handle()]
    for number, handle in enumerate(handles):
        names.add(handle, 'default', f'ad-{number}', base_model='tiny')
    assert names.find('default', preferred=['ad-1', 'ad-7']) == 'ad-1'
    with pytest.raises(ValueError, match='default'):
        names.find('default', preferred=['ad-0', 'ad-1'])


def test_adapters_of_the_base_model_come_first() -> None:
    """A sampler of one model is not asked for weights of another while there are some of its own."""
    names, first, second = AdapterNames(), Handle(), Handle()
    names.add(first, 'default', 'ad-1', base_model='tiny')
    names.add(second, 'default', 'ad-2', base_model='large')
    assert [names.find('default', base_model=model) for model in ('tiny', 'large')] == ['ad-1', 'ad-2']
    names.remove(second, 'ad-2')
    assert names.find('default', base_model='large') == 'ad-1'


def test_a_handle_that_is_gone_yields_to_one_that_lives() -> None:
    """Until then its adapters are still found, as at the end of a function that trained them."""
    names, gone = AdapterNames(), Handle()
    names.add(gone, 'default', 'ad-1', base_model='tiny')
    del gone
    assert names.find('default') == 'ad-1'
    handle = Handle()
    names.add(handle, 'default', 'ad-2', base_model='tiny')
    assert names.find('default') == 'ad-2'
