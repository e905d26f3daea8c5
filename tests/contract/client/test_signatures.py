"""The client has the methods and arguments of the library, so that training loops only change their imports."""

import dataclasses
import inspect
from typing import Any

from twinkle.data_format import LayerHealth, StepResult
from twinkle.model import MultiLoraTransformersModel as LibraryModel
from twinkle_client import TwinkleClient
from twinkle_client.model import LayerHealth as LayerHealthDict
from twinkle_client.model import MultiLoraTransformersModel as RemoteModel
from twinkle_client.model import StepOutput
from twinkle_client.rpc import RemoteMethod, RemoteStream

LOCAL_ONLY = {'chosen_adapter', 'export_base', 'export_weights', 'get_state_dict'}
"""Methods that need the weights in this process. Remote programs download checkpoints or publish versions instead."""
RENAMED_OR_ABSENT = {
    'apply_patch': {'patch'},
    'load': {'name', 'output_dir'},
    'resume_from_checkpoint': {'checkpoint_dir'},
    'save': {'output_dir', 'merge_lora'},
}
"""Library arguments that name a local folder, that the contract lacks, or that `export_merged` replaces.

This list may only shrink.
"""


def verbs_of(model: type) -> dict[str, Any]:
    """Return the public methods of a class; remote methods are replaced by the functions that they wrap."""
    found = {name: inspect.getattr_static(model, name) for name in dir(model) if not name.startswith('_')}
    plain = {name: getattr(item, '_function', item) for name, item in found.items()}
    return {name: item for name, item in plain.items() if inspect.isfunction(item)}


def parameters_of(function: Any) -> list[inspect.Parameter]:
    """Return a method's parameters without `self`."""
    return list(inspect.signature(function).parameters.values())[1:]


def test_every_verb_of_the_library_exists() -> None:
    """Every public library method exists on the remote handle, except those that need the weights in this process."""
    assert set(verbs_of(LibraryModel)) - set(verbs_of(RemoteModel)) == LOCAL_ONLY


def test_client_arguments_have_the_library_names() -> None:
    """Every argument of a library verb exists in the client, except those in `RENAMED_OR_ABSENT`."""
    remote = verbs_of(RemoteModel)
    missing = {
        name: {parameter.name for parameter in parameters_of(function)}
        - {parameter.name for parameter in parameters_of(remote[name])}
        for name, function in verbs_of(LibraryModel).items()
        if name in remote
    }
    assert {name: names for name, names in missing.items() if names} == RENAMED_OR_ABSENT


def test_client_arguments_have_the_library_defaults() -> None:
    """Defaults that are floats, booleans or strings are equal in the library and in the client."""
    remote = verbs_of(RemoteModel)
    differing = [
        (name, parameter.name)
        for name, function in verbs_of(LibraryModel).items()
        if name in remote
        for parameter in parameters_of(function)
        for other in parameters_of(remote[name])
        if other.name == parameter.name and isinstance(parameter.default, bool | float | str)
        if other.default != parameter.default
    ]
    assert differing == []


def test_every_remote_verb_has_blocking_and_async_forms() -> None:
    """All verbs are remote methods, except verbs that return an object and the stream `watch_operations`."""
    client = TwinkleClient('http://127.0.0.1:9', 'key')
    try:
        model = RemoteModel('tiny', client=client)
        local = {name for name in verbs_of(RemoteModel) if not isinstance(getattr(model, name), RemoteMethod)}
        assert local == {'adapter_id', 'metrics', 'pipeline', 'rollouts', 'watch_operations'}
        assert isinstance(model.watch_operations, RemoteStream)
    finally:
        client.close()


def test_verbs_of_the_client_take_an_adapter_name() -> None:
    """All verbs that only the client has, except `estimate`, take the argument `adapter_name`."""
    added = set(verbs_of(RemoteModel)) - set(verbs_of(LibraryModel))
    lacking = {
        name
        for name in added
        if 'adapter_name' not in {parameter.name for parameter in parameters_of(verbs_of(RemoteModel)[name])}
    }
    assert lacking == {'estimate'}


def test_step_outputs_have_the_library_fields() -> None:
    """The client's step dictionaries have the fields of the library's results, and the receipt of a remote call."""
    assert list(LayerHealthDict.__annotations__) == _fields(LayerHealth)
    assert set(StepOutput.__annotations__) == {*_fields(StepResult), 'receipt'}


def _fields(result: type) -> list[str]:
    return [field.name for field in dataclasses.fields(result)]
