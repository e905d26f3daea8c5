"""A tokenized training example or prompt.

A feature is a plain dict, so that user code can build, inspect and extend it. Its arrays may be lists, NumPy arrays or
torch tensors. They have equal lengths and one dimension, except for the streams that are wide in
`twinkle.data_format.STREAMS`, for routed experts, and for images, videos and audio.
"""

from collections.abc import Sequence
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

IGNORE_INDEX = -100
"""Label of a position that does not contribute to the loss."""

IntArray = Sequence[int] | npt.NDArray[np.integer[Any]]
FloatArray = Sequence[float] | npt.NDArray[np.floating[Any]]


class InputFeature(TypedDict, total=False):
    """Token-level input of a model.

    Legend: T tokens, K ids per label, V ids in the vocabulary, P patches of C values, N images, videos or audio clips,
    M mel bands, F frames.

    Labels are already shifted: `labels[t]` is the token to predict from the tokens `0..t`, so that
    `labels[t] == input_ids[t + 1]` unless it is `IGNORE_INDEX`.
    """

    input_ids: IntArray
    """int [T]. Token ids."""
    attention_mask: IntArray
    """int [T]. 1 for a real token, 0 for padding. Defaults to ones."""
    position_ids: IntArray
    """int [T]. Position of each token, which restarts at 0 at the beginning of each packed example. With images or
    videos [3, T]: time, height and width, for models whose positions have these axes."""
    labels: IntArray
    """int [T]. Shifted labels; `IGNORE_INDEX` where a position has no label."""
    loss_weights: FloatArray
    """float [T]. Weight of each label in the loss. Defaults to 1.0."""
    completion_mask: IntArray
    """int [T]. 1 if the model generated the token at this position, 0 otherwise. A label counts only if its token,
    which is at the next position, is marked with 1. If unset, all labels count."""
    length: int
    """Number of real tokens."""
    advantages: FloatArray
    """float [T]. Advantage of each label, for policy losses."""
    old_logps: FloatArray
    """float [T]. Natural log-probability of each label under the policy that sampled it."""
    ref_logps: FloatArray
    """float [T]. Natural log-probability of each label under the reference model."""
    returns: FloatArray
    """float [T]. Return of each label, to which value losses fit the values."""
    old_values: FloatArray
    """float [T]. Value of each label at the time of sampling, for value losses."""
    teacher_topk_ids: npt.NDArray[np.integer[Any]]
    """int [T, K]. The teacher's most likely ids at each label, for distillation."""
    teacher_topk_logps: npt.NDArray[np.floating[Any]]
    """float [T, K]. Natural log-probabilities of `teacher_topk_ids` under the teacher."""
    teacher_logits: npt.NDArray[np.floating[Any]]
    """float [T, V]. The teacher's logits at each label, for small vocabularies."""
    pixel_values: npt.NDArray[np.floating[Any]]
    """float [P, C]. Concatenated patches of all images, as the model's image processor returns them."""
    image_grid_thw: npt.NDArray[np.integer[Any]]
    """int [N, 3]. Time steps (always 1), rows and columns of the patches of each image."""
    pixel_values_videos: npt.NDArray[np.floating[Any]]
    """float [P, C]. Concatenated patches of all videos."""
    video_grid_thw: npt.NDArray[np.integer[Any]]
    """int [N, 3]. Time steps, rows and columns of the patches of each video."""
    second_per_grid_ts: FloatArray
    """float [N]. Duration of a time step of each video in seconds, from which `position_ids` are computed."""
    input_features: npt.NDArray[np.floating[Any]]
    """float [N, M, F]. Mel bands of all audio clips, each padded with silence to F frames."""
    feature_attention_mask: npt.NDArray[np.integer[Any]]
    """int [N, F]. 1 for the frames of each clip, which come first, and 0 for the padding."""
    routed_experts: npt.NDArray[np.integer[Any]]
    """int [T, layers with experts, experts per token]. Experts that the pass uses instead of the routers' choices
    (routing replay). The routers still compute the weights of these experts. If there are fewer than T rows, they
    belong to the first tokens, and the routers choose the experts of the remaining tokens."""
    messages: list[dict[str, Any]]
    """Chat from which the feature was encoded, for rewards. Never sent to a model service."""
    user_data: list[tuple[str, str]]
    """`(key, JSON)` pairs of additional data, for rewards. Never sent to a model service."""
    samples: list[dict[str, Any]]
    """Fields of each packed example other than its arrays, such as `messages`. Never sent to a model service."""
