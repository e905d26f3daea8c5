"""Unit tests of the conversion of encoded examples to Tinker datums."""

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
    """Ignored labels get weight 0, and tokens after the last label are dropped."""
    assert _columns(FEATURE) == ([1, 5, 6, 7], [5, 6, 7, 2], [0.0, 1.0, 0.0, 1.0])


def test_arrays_and_lists_are_equivalent() -> None:
    """NumPy arrays from a template and lists from JSON give the same datum."""
    assert _columns({name: np.array(values, dtype=np.int32) for name, values in FEATURE.items()}) == _columns(FEATURE)


def test_last_token_may_have_a_label() -> None:
    """The label of the last token is used, for example in a long example that was split."""
    assert _columns({'input_ids': [1, 5], 'labels': [5, 9]}) == ([1, 5], [5, 9], [1.0, 1.0])


def test_weights_of_labels_are_kept_and_padding_is_dropped() -> None:
    """`loss_weights` become the weights of labelled tokens, and tokens masked by `attention_mask` are dropped."""
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
def test_invalid_features_are_refused(feature: dict[str, Any]) -> None:
    """A feature with missing or inconsistent columns, or with advantages, raises ValueError."""
    with pytest.raises(ValueError, match=r'input_ids|labels|loss_weights|advantages'):
        input_feature_to_datum(feature)


def test_both_import_paths_give_the_same_function() -> None:
    """The import path in older programs gives the same function as the new path."""
    assert older_name is input_feature_to_datum


def test_import_of_the_function_loads_no_sdk() -> None:
    """Importing the function imports neither the Tinker SDK nor torch."""
    program = "import sys, twinkle.server.common; sys.exit('tinker' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, '-c', program], check=False).returncode == 0
