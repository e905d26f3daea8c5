"""Our examples in the Tinker SDK's types say the same."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from twinkle.server.common import input_feature_to_datum
from twinkle.server.tinker.common import input_feature_to_datum as older_name

FEATURE = {'input_ids': [1, 5, 6, 7, 2], 'labels': [-100, 6, -100, 2, -100]}


def _columns(feature: dict[str, Any]) -> tuple[list[int], list[int], list[float]]:
    datum = input_feature_to_datum(feature)
    inputs = datum.loss_fn_inputs
    return datum.model_input.to_ints(), inputs['target_tokens'].tolist(), inputs['weights'].tolist()


def test_labels_become_targets_with_weights() -> None:
    """What is ignored has weight 0; tokens behind the last label are left out."""
    assert _columns(FEATURE) == ([1, 5, 6, 7], [5, 6, 7, 2], [0.0, 1.0, 0.0, 1.0])


def test_arrays_are_taken_as_lists_are() -> None:
    """A template's arrays and JSON's lists mean the same."""
    assert _columns({name: np.array(values, dtype=np.int32) for name, values in FEATURE.items()}) == _columns(FEATURE)


def test_last_token_may_have_a_label() -> None:
    """A label whose own token is in the next piece of a long example counts, too."""
    assert _columns({'input_ids': [1, 5], 'labels': [5, 9]}) == ([1, 5], [5, 9], [1.0, 1.0])


def test_weights_of_labels_are_kept_and_padding_is_not() -> None:
    """`loss_weights` stand where labels count; what the attention mask leaves out is not sent."""
    feature = {
        'input_ids': [0, 1, 5, 6],
        'labels': [-100, 5, 6, -100],
        'attention_mask': [0, 1, 1, 1],
        'loss_weights': [1.0, 0.5, 2.0, 1.0],
    }
    assert _columns(feature) == ([1, 5], [5, 6], [0.5, 2.0])


@pytest.mark.parametrize(
    'feature',
    [
        {'labels': [1]},
        {'input_ids': [1, 2]},
        {'input_ids': [1, 2], 'labels': [-100, -100]},
        {'input_ids': [1, 2], 'labels': [2]},
        {'input_ids': [[1, 2]], 'labels': [[2, -100]]},
        {**FEATURE, 'loss_weights': [1.0]},
        {**FEATURE, 'advantages': 0.5},
    ],
)
def test_what_cannot_be_said_is_refused(feature: dict[str, Any]) -> None:
    """Nothing is sent of an example that is no example, or that another loss is meant for."""
    with pytest.raises(ValueError, match=r'input_ids|labels|loss_weights|advantages'):
        input_feature_to_datum(feature)


def test_both_names_are_one() -> None:
    """Older programs import it from another place."""
    assert older_name is input_feature_to_datum


def test_importing_it_loads_no_sdk() -> None:
    """The SDK takes seconds to load; who imports the name may not have it."""
    program = "import sys, twinkle.server.common; sys.exit('tinker' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, '-c', program], check=False).returncode == 0
