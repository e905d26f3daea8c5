"""One image, video or audio clip after conversion by a reader."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from twinkle.data_format import Grid, MediaKind


@dataclass(frozen=True)
class ReadMedia:
    """One image, video or audio clip as arrays for the model."""

    kind: MediaKind
    """'image', 'video' or 'audio'."""
    patches_PC: npt.NDArray[np.float32]
    """Flattened patches [P, C] of an image or video, or mel bands [frames, bands] of a clip."""
    grid: Grid
    """Patches (time, height, width) of an image or video; (valid frames, all frames, 1) of a clip."""
    seconds: float
    """Duration of one temporal step of a video in seconds; 0.0 for images and clips."""
