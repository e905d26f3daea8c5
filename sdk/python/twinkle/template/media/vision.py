"""Convert images and videos to patches with the model's own image processor."""

import importlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from twinkle.data_format import Grid, InputFeature, MediaKind, VisionSpec
from twinkle.template.errors import InvalidTrajectory, TemplateError
from twinkle.template.media.loading import Video
from twinkle.template.media.read_media import ReadMedia
from twinkle.template.tokenizer import ChatTokenizer

_PROCESSORS = ('Qwen2VLImageProcessor', 'Qwen2VLImageProcessorFast', 'Qwen2VLImageProcessorPil')
"""Names of the supported image processor in `preprocessor_config.json`; all refer to the same processor."""
_ARGUMENTS = (
    'do_convert_rgb', 'do_normalize', 'do_rescale', 'do_resize', 'image_mean', 'image_std', 'max_pixels', 'merge_size',
    'min_pixels', 'patch_size', 'resample', 'rescale_factor', 'size', 'temporal_patch_size',
)  # fmt: skip
"""Settings in `preprocessor_config.json` that are passed to the image processor."""


class VisionReader:
    """Converts images and videos with the image processor in a model's folder.

    Args:
        spec: vision settings from the model's configuration.
        folder: the model's folder.
        tokenizer: the model's tokenizer.
        names: the media tokens and their delimiters as strings, by role: 'open', 'close', 'image' and 'video'.

    Raises:
        TemplateError: the tokenizer lacks one of these tokens.

    Concurrency: safe to share between threads.
    """

    def __init__(self, spec: VisionSpec, folder: Path, tokenizer: ChatTokenizer, names: dict[str, str]) -> None:
        self.spec = spec
        self._folder = folder
        self._names = names
        missing = [name for name in names.values() if tokenizer.token_id(name) is None]
        if missing:
            raise TemplateError(f'the tokenizer in {folder.name} lacks the media tokens {missing}')

    @classmethod
    def of(cls, spec: VisionSpec, config: Mapping[str, Any], folder: Path, tokenizer: ChatTokenizer) -> 'VisionReader':
        """Return the reader of a model's folder.

        Args:
            spec: vision settings from the model's configuration.
            config: content of the model's `config.json`.
            folder: the model's folder.
            tokenizer: the model's tokenizer.

        Raises:
            TemplateError: the tokenizer lacks a token of media.
        """
        ids = {
            'open': int(config.get('vision_start_token_id', 151652)),
            'close': int(config.get('vision_end_token_id', 151653)),
            'image': spec.image_token_id,
            'video': spec.video_token_id,
        }
        return cls(spec, folder, tokenizer, {name: tokenizer.decode([one]) for name, one in ids.items()})

    def placeholder_text(self, kind: MediaKind) -> str:
        """Return the text that replaces one placeholder of this kind in a rendered chat."""
        return f'{self._names["open"]}{self._names[kind]}{self._names["close"]}'

    @property
    def reserved(self) -> tuple[str, ...]:
        """The media tokens as strings; messages must not contain them, because the model would read them as media."""
        return self._names['image'], self._names['video']

    def read(self, kind: MediaKind, opened: Any, field_path: str) -> ReadMedia:
        """Convert a decoded image or video to patches; see `read_image` and `read_video`."""
        return self.read_image(opened, field_path) if kind == 'image' else self.read_video(opened, field_path)

    def fields(self, media: Sequence[ReadMedia]) -> InputFeature:
        """Return the media fields of a feature: patches float32 [P, C] and grids int64 [N, 3] for each kind in `media`.

        Videos also have `second_per_grid_ts`, float32 [N] in seconds.
        """
        fields = InputFeature()
        images = [item for item in media if item.kind == 'image']
        videos = [item for item in media if item.kind == 'video']
        if images:
            fields['pixel_values'] = np.concatenate([item.patches_PC for item in images])
            fields['image_grid_thw'] = np.asarray([item.grid for item in images], np.int64)
        if videos:
            fields['pixel_values_videos'] = np.concatenate([item.patches_PC for item in videos])
            fields['video_grid_thw'] = np.asarray([item.grid for item in videos], np.int64)
            fields['second_per_grid_ts'] = np.asarray([item.seconds for item in videos], np.float32)
        return fields

    def read_image(self, image: Image.Image, field_path: str) -> ReadMedia:
        """Convert an image to patches.

        Raises:
            InvalidTrajectory: the image processor refuses the image.
            TemplateError: transformers is not installed, or the model's image processor is not supported.
        """
        patches_PC, grid = self._patches(image, field_path)
        return ReadMedia('image', patches_PC, grid, 0.0)

    def read_video(self, video: Video, field_path: str) -> ReadMedia:
        """Convert a video to patches; the last frame is repeated to fill the last temporal step.

        The video processors of transformers need torchvision, so this method runs the image processor on each frame.
        The image processor repeats the pixels of an image in every temporal slot of a patch, but in a patch of a video
        each slot contains a different frame. This method therefore takes one slot from each frame's patches, and stacks
        the slots of a step.

        Raises:
            InvalidTrajectory: the image processor refuses a frame.
            TemplateError: see `read_image`.
        """
        step = self.spec.temporal_patch_size
        patches = [self._patches(frame, field_path) for frame in video.frames]
        patches += [patches[-1]] * (-len(patches) % step)
        _, rows, columns = patches[0][1]
        channels = self._channels
        slots = [one.reshape(len(one), channels, step, -1)[:, :, 0] for one, _ in patches]
        steps = [
            np.stack(slots[begin : begin + step], axis=2).reshape(rows * columns, -1)
            for begin in range(0, len(slots), step)
        ]
        grid = (len(steps), rows, columns)
        return ReadMedia('video', np.concatenate(steps), grid, step / video.frames_per_second)

    @cached_property
    def _processor(self) -> Any:
        """The image processor of transformers that does not need torchvision, loaded on first use."""
        settings: dict[str, Any] = json.loads((self._folder / 'preprocessor_config.json').read_text())
        name = settings.get('image_processor_type', _PROCESSORS[0])
        if name not in _PROCESSORS:
            raise TemplateError(
                f'{self._folder.name} has the image processor {name}, which is not supported; '
                f'use a model with one of {", ".join(_PROCESSORS)}'
            )
        try:
            module = importlib.import_module('transformers.models.qwen2_vl.image_processing_pil_qwen2_vl')
        except ImportError:
            raise TemplateError('images need transformers; install twinkle-grpc[model]') from None
        return module.Qwen2VLImageProcessorPil(**{key: settings[key] for key in _ARGUMENTS if key in settings})

    @property
    def _channels(self) -> int:
        side = int(self._processor.patch_size)
        return self.spec.patch_width // (self.spec.temporal_patch_size * side * side)

    def _patches(self, image: Image.Image, field_path: str) -> tuple[npt.NDArray[np.float32], Grid]:
        try:
            read = self._processor.preprocess([image], return_tensors='np')
        except ValueError as error:
            raise InvalidTrajectory(field_path, f'was refused by the image processor: {error}') from None
        frames, rows, columns = (int(side) for side in read['image_grid_thw'][0])
        return np.asarray(read['pixel_values'], np.float32), (frames, rows, columns)
