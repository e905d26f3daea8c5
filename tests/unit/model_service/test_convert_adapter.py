"""Conversion of requests for adapters."""

import pytest

from twinkle.api.model.v1 import adapter_service_pb2 as wire
from twinkle.api.model.v1 import training_config_pb2
from twinkle_services.kit.errors import InvalidField
from twinkle_services.model.api.convert_adapter import create_request_from_proto, save_prefix_from_proto


def request(**fields):
    """Return a request for an adapter."""
    return wire.CreateAdapterRequest(request_id='r', base_model='tiny', **fields)


def test_unset_and_empty_full_parameters_differ():
    """An empty FullParameterConfig selects all parameters; an unset FullParameterConfig selects LoRA."""
    assert create_request_from_proto(request()).full_parameters is None
    assert create_request_from_proto(request(full_parameters={})).full_parameters == ()
    some = create_request_from_proto(request(full_parameters={'target_modules': ['mlp', 'norm']}))
    assert some.full_parameters == ('mlp', 'norm')


@pytest.mark.parametrize(
    ('fields', 'field'),
    [
        ({'full_parameters': {}, 'lora_config': training_config_pb2.LoraConfig()}, 'lora_config'),
        ({'adapter_id': 'a/b'}, 'adapter_id'),
        ({'adapter_id': 'a' * 129}, 'adapter_id'),
        ({'full_parameters': {'target_modules': ['mlp', '']}}, 'full_parameters.target_modules[1]'),
        ({'full_parameters': {'target_modules': ['mlp', 'mlp']}}, 'full_parameters.target_modules[1]'),
    ],
)
def test_contradiction_is_named(fields, field):
    """A contradictory or malformed field is refused with its path."""
    with pytest.raises(InvalidField) as refusal:
        create_request_from_proto(request(**fields))
    assert refusal.value.field == field


@pytest.mark.parametrize(
    ('fields', 'field'),
    [
        ({'user_metadata': {str(number): '' for number in range(65)}}, 'user_metadata'),
        ({'user_metadata': {'n' * 257: ''}}, 'user_metadata'),
        ({'user_metadata': {'note': 'x' * 4097}}, "user_metadata['note']"),
        ({'lora_config': {'target_modules': ['q_proj'] * 4097}}, 'lora_config.target_modules'),
        ({'lora_config': {'rank_pattern': {str(n): 1 for n in range(4097)}}}, 'lora_config.rank_pattern'),
        ({'full_parameters': {'target_modules': ['mlp'] * 100_000}}, 'full_parameters.target_modules'),
    ],
    ids=['labels', 'name', 'value', 'targets', 'pattern', 'parameters'],
)
def test_data_stored_with_an_adapter_is_bounded(fields, field):
    """Metadata, target modules and rank patterns are limited in size, because an adapter keeps them in memory."""
    with pytest.raises(InvalidField) as refusal:
        create_request_from_proto(request(**fields))
    assert refusal.value.field == field


def test_session_id_is_stored_and_has_a_length_limit():
    """An adapter stores its session id; the length of the id is limited."""
    assert create_request_from_proto(request(session_id='ss-1')).session_id == 'ss-1'
    with pytest.raises(InvalidField) as refusal:
        create_request_from_proto(request(session_id='s' * 129))
    assert refusal.value.field == 'session_id'


@pytest.mark.parametrize('prefix', ['a/b', '.', '-', 'x' * 65, 'a b'])
def test_a_malformed_save_prefix_is_refused(prefix):
    """A malformed prefix for checkpoint names is refused, and a valid prefix is returned unchanged."""
    with pytest.raises(InvalidField):
        save_prefix_from_proto(prefix)
    assert save_prefix_from_proto('session-expired') == 'session-expired'


def test_adapter_limit_is_not_part_of_the_fingerprint():
    """The gateway's adapter limit is not part of the request's fingerprint."""
    plain, full = create_request_from_proto(request()), create_request_from_proto(request(adapters_limit=0))
    assert (plain.adapters_limit, full.adapters_limit) == (None, 0)
    assert plain.fingerprint == full.fingerprint
