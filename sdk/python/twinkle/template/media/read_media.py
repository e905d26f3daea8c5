"""What a reader made of one image, video or clip."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from twinkle.data_format import Grid, MediaKind


@dataclass(frozen=True)
class ReadMedia:
    """One image, video or clip as the model reads it."""

    kind: MediaKind
    patches_PC: npt.NDArray[np.float32]
    """Patches, or mel bands of each frame."""
    grid: Grid
    seconds: float
    """That one step of a video's time takes; else 0."""
