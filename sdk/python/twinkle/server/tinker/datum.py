"""Conversion of an encoded example to a Tinker `Datum`, which contains a target and a weight for each input token."""

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from twinkle.component import MissingLibrary
from twinkle.data_format import IGNORE_INDEX

if TYPE_CHECKING:
    import tinker


def input_feature_to_datum(input_feature: Mapping[str, Any]) -> 'tinker.Datum':
    """Convert an encoded example to a `tinker.Datum` for the loss 'cross_entropy'.

    Labels are already shifted by one token, so they become the targets unchanged. Where the label is ignored, the
    weight is 0 and the target is the next token. Padding and the tokens after the last label are dropped.

    Args:
        input_feature: mapping with `input_ids` and `labels`, and optionally `loss_weights` and `attention_mask`.

    Raises:
        ValueError: `input_ids` or `labels` is missing, every label is ignored, lengths differ, or `advantages` is set,
            which only policy losses use.
        MissingLibrary: the Tinker SDK is not installed.
    """
    types = _tinker()
    if input_feature.get('advantages') is not None:
        raise ValueError(
            'advantages is not used by cross_entropy; for a policy loss, build a tinker.Datum with logprobs and '
            'advantages'
        )
    tokens = _column(input_feature, 'input_ids')
    count = len(tokens)
    is_kept = _column(input_feature, 'attention_mask', count=count, default=1) != 0
    labels = _column(input_feature, 'labels', count=count)[is_kept]
    weights = _column(input_feature, 'loss_weights', count=count, default=1)[is_kept]
    is_label = labels != IGNORE_INDEX
    if not is_label.any():
        raise ValueError('labels: every label is ignored; encode a chat that contains an answer')
    end = int(np.flatnonzero(is_label)[-1]) + 1
    tokens = tokens[is_kept]
    targets = np.where(is_label, labels, np.append(tokens[1:], 0))
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:end].tolist()),
        loss_fn_inputs={
            'target_tokens': types.TensorData.from_numpy(targets[:end].astype(np.int64)),
            'weights': types.TensorData.from_numpy((weights * is_label)[:end].astype(np.float32)),
        },
    )


def _column(
    feature: Mapping[str, Any], name: str, *, count: int | None = None, default: int | None = None
) -> npt.NDArray[Any]:
    """Return a column of a feature; if the column is missing, `count` copies of `default`."""
    given: Any = feature.get(name)
    if given is None:
        if default is None or count is None:
            raise ValueError(f'{name} is missing; give an encoded example')
        return np.full(count, default)
    values: npt.NDArray[Any] = np.asarray(given)
    if values.ndim != 1 or (count is not None and len(values) != count):
        wanted = 'a list of numbers' if count is None else f'{count} numbers, one for each of input_ids'
        raise ValueError(f'{name} must be {wanted}, got shape {values.shape}')
    return values


def _tinker() -> ModuleType:
    # Imported here because the SDK takes seconds to load.
    try:
        return importlib.import_module('tinker')
    except ImportError as error:
        raise MissingLibrary('tinker', 'tinker') from error
