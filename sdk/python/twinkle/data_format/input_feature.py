"""One tokenised training example or prompt.

A feature is a plain dict so that user code may build, inspect and extend it; the arrays
may be lists, numpy arrays or torch tensors, all equally long, and one-dimensional but for the
streams that `twinkle.data_format.STREAMS` calls wide.
"""

from collections.abc import Sequence
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

IGNORE_INDEX = -100
"""Label of a position that adds nothing to the loss."""

IntArray = Sequence[int] | npt.NDArray[np.integer[Any]]
FloatArray = Sequence[float] | npt.NDArray[np.floating[Any]]


class InputFeature(TypedDict, total=False):
    """Token-level input of a model; `T` is its number of tokens.

    Labels are already shifted: `labels[t]` is the token to be predicted from the tokens
    `0..t`, so `labels[t] == input_ids[t + 1]` wherever it is not `IGNORE_INDEX`.
    """

    input_ids: IntArray
    """int [T]. Token ids."""
    attention_mask: IntArray
    """int [T]. 1 for a real token, 0 for padding. Unset: all ones."""
    position_ids: IntArray
    """int [T]. Position of each token; restarts at 0 where a packed sample begins. With images or videos [3, T]: time,
    height and width, for models whose positions have these axes."""
    labels: IntArray
    """int [T]. Shifted targets, `IGNORE_INDEX` where the loss is masked."""
    loss_weights: FloatArray
    """float [T]. Factor of each label's loss. Unset: 1.0 for every label that is not ignored."""
    completion_mask: IntArray
    """int [T]. 1 where the model itself produced the token at this position, 0 elsewhere. A label counts only where
    the token it asks for, the next one, is marked 1. Unset: the labels alone say what counts."""
    length: int
    """Number of real tokens."""
    advantages: FloatArray
    """float [T]. Advantage of the label's token (RL losses)."""
    old_logps: FloatArray
    """float [T]. Natural log-probability of the label under the policy that sampled it."""
    ref_logps: FloatArray
    """float [T]. Natural log-probability of the label under the reference model."""
    returns: FloatArray
    """float [T]. Return of the label, to fit values to (value losses)."""
    old_values: FloatArray
    """float [T]. Value of the label when it was sampled (value losses)."""
    teacher_topk_ids: npt.NDArray[np.integer[Any]]
    """int [T, K]. The teacher's likeliest ids at the label (distillation)."""
    teacher_topk_logps: npt.NDArray[np.floating[Any]]
    """float [T, K]. Their natural log-probabilities under the teacher."""
    teacher_logits: npt.NDArray[np.floating[Any]]
    """float [T, V]. The teacher's logits at the label, for small vocabularies."""
    pixel_values: npt.NDArray[np.floating[Any]]
    """float [P, C]. Patches of all images, one after the other, as the model's image processor makes them."""
    image_grid_thw: npt.NDArray[np.integer[Any]]
    """int [N, 3]. Steps of time (1), rows and columns of patches of each image."""
    pixel_values_videos: npt.NDArray[np.floating[Any]]
    """float [P, C]. Patches of all videos, one after the other."""
    video_grid_thw: npt.NDArray[np.integer[Any]]
    """int [N, 3]. Steps of time, rows and columns of patches of each video."""
    second_per_grid_ts: FloatArray
    """float [N]. Seconds that one step of each video's time takes; its positions say the same."""
    input_features: npt.NDArray[np.floating[Any]]
    """float [N, M, F]. Mel bands of all clips of audio, silence behind each up to F frames."""
    feature_attention_mask: npt.NDArray[np.integer[Any]]
    """int [N, F]. 1 for the frames of each clip that are sound, which come first, 0 for the silence behind."""
    messages: list[dict[str, Any]]
    """The chat this feature was encoded from, kept for rewards. Never sent to the trainer."""
    user_data: list[tuple[str, str]]
    """`(key, JSON)` pairs carried along for rewards. Never sent to the trainer."""
    samples: list[dict[str, Any]]
    """Of a pack: what each of its examples carried beside tokens, such as its messages. Never sent to the trainer."""
