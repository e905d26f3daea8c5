"""Configurations of PEFT methods other than LoRA are refused, in process and by the client."""

import inspect
import warnings
from typing import Any

import peft
import pytest
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

from twinkle.data_format import LoraConfig
from twinkle_client.convert.config import lora_config

METHODS = {config: method.value for method, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
"""`peft_type` of each configuration class that PEFT can apply."""
OTHER_METHODS = sorted((config for config in METHODS if config is not peft.LoraConfig), key=lambda item: item.__name__)
"""Configuration classes of the methods other than LoRA."""
OTHER_CLASSES = sorted(
    name
    for name, found in inspect.getmembers(peft, inspect.isclass)
    if name.endswith('Config') and found not in METHODS
)
"""Names of the base classes, and of classes that configure a part of LoRA, such as `LoftQConfig`."""
NEEDED: dict[str, dict[str, Any]] = {'AdaLoraConfig': {'total_step': 10}, 'CPTConfig': {'task_type': 'CAUSAL_LM'}}
"""Required arguments of configuration classes."""


@pytest.mark.parametrize('config_class', OTHER_METHODS, ids=lambda config_class: config_class.__name__)
@pytest.mark.parametrize('read', [LoraConfig.of, lora_config], ids=['in process', 'client'])
def test_other_method_is_refused_by_name(config_class: type[peft.PeftConfig], read: Any) -> None:
    """Every method of the installed PEFT except LoRA is refused, and the message names the method."""
    config = _make(config_class)
    with pytest.raises(ValueError, match=rf"{config_class.__name__} has peft_type '{METHODS[config_class]}'"):
        read(config)


@pytest.mark.parametrize('name', OTHER_CLASSES)
@pytest.mark.parametrize('read', [LoraConfig.of, lora_config], ids=['in process', 'client'])
def test_configuration_without_a_method_is_refused_by_name(name: str, read: Any) -> None:
    """A base class, and a class that configures a part of LoRA, are refused; the error names the class."""
    config_class = getattr(peft, name)
    with pytest.raises((TypeError, ValueError), match=name):
        read(config_class.__new__(config_class))


@pytest.mark.parametrize('method', [*METHODS.values(), 'NEW_METHOD'])
def test_other_method_in_a_mapping_is_refused_by_name(method: str) -> None:
    """A mapping whose `peft_type` is a method other than LoRA is refused, and the message names the method."""
    with pytest.raises((TypeError, ValueError), match='peft_type' if method == 'LORA' else repr(method)):
        LoraConfig.of({'r': 8, 'peft_type': method})


def test_lora_is_accepted() -> None:
    """A `peft.LoraConfig` is accepted by the client and by the library."""
    config = peft.LoraConfig(r=3, target_modules=['q_proj'])
    assert LoraConfig.of(config).r == lora_config(config).lora_rank == 3


def _make(config_class: type[peft.PeftConfig]) -> Any:
    with warnings.catch_warnings(action='ignore'):
        try:
            return config_class(**NEEDED.get(config_class.__name__, {}))
        except ImportError:
            # The method needs a package that is not installed.
            config = config_class.__new__(config_class)
            config.peft_type = METHODS[config_class]
            return config
