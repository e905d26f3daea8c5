"""The model's own image processor: from pictures to patches, and how many tokens stand for each."""

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
"""Names of one and the same processor in `preprocessor_config.json`."""
_ARGUMENTS = (
    'do_convert_rgb', 'do_normalize', 'do_rescale', 'do_resize', 'image_mean', 'image_std', 'max_pixels', 'merge_size',
    'min_pixels', 'patch_size', 'resample', 'rescale_factor', 'size', 'temporal_patch_size',
)  # fmt: skip


class VisionReader:
    """What a model's folder says of its images and videos.

    Concurrency: safe to share between threads.
    """

    def __init__(self, spec: VisionSpec, folder: Path, tokenizer: ChatTokenizer, names: dict[str, str]) -> None:
        self.spec = spec
        self._folder = folder
        self._names = names
        """Texts of the tokens that stand for pieces of each kind, and of those around them."""
        missing = [name for name in names.values() if tokenizer.token_id(name) is None]
        if missing:
            raise TemplateError(f'{folder.name} has no tokens {missing}, which its images need')

    @classmethod
    def of(cls, spec: VisionSpec, config: Mapping[str, Any], folder: Path, tokenizer: ChatTokenizer) -> 'VisionReader':
        """Return the reader of a model's folder."""
        ids = {
            'open': int(config.get('vision_start_token_id', 151652)),
            'close': int(config.get('vision_end_token_id', 151653)),
            'image': spec.image_token_id,
            'video': spec.video_token_id,
        }
        return cls(spec, folder, tokenizer, {name: tokenizer.decode([one]) for name, one in ids.items()})

    def shown(self, kind: MediaKind) -> str:
        """Return the text that stands for one image or video in a rendered chat."""
        return f'{self._names["open"]}{self._names[kind]}{self._names["close"]}'

    @property
    def reserved(self) -> tuple[str, ...]:
        """Texts of tokens that no message may hold, for the model would take them for an image."""
        return self._names['image'], self._names['video']

    def read(self, kind: MediaKind, opened: Any, place: str) -> ReadMedia:
        """Return an opened image or video as patches; raises as `read_image`."""
        return self.read_image(opened, place) if kind == 'image' else self.read_video(opened, place)

    def fields(self, media: Sequence[ReadMedia]) -> InputFeature:
        """Return what a feature says of its images and videos."""
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

    def read_image(self, image: Image.Image, place: str) -> ReadMedia:
        """Return an image as patches.

        Raises:
            InvalidTrajectory: the processor refuses it.
        """
        patches_PC, grid = self._patches(image, place)
        return ReadMedia('image', patches_PC, grid, 0.0)

    def read_video(self, video: Video, place: str) -> ReadMedia:
        """Return a video as patches; the last frame is repeated where a step of time is not full.

        transformers' video processors need torchvision. Theirs puts the frames of a step into the slots into which the
        image processor puts one image several times, so that each frame is run as an image here, and its slot taken.

        Raises:
            InvalidTrajectory: the processor refuses a frame.
        """
        step = self.spec.temporal_patch_size
        patches = [self._patches(frame, place) for frame in video.frames]
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
        """The processor of transformers, without torchvision; loaded with the first image."""
        settings: dict[str, Any] = json.loads((self._folder / 'preprocessor_config.json').read_text())
        name = settings.get('image_processor_type', _PROCESSORS[0])
        if name not in _PROCESSORS:
            raise TemplateError(f'{self._folder.name} has the image processor {name}; known are {_PROCESSORS}')
        try:
            module = importlib.import_module('transformers.models.qwen2_vl.image_processing_pil_qwen2_vl')
        except ImportError:
            raise TemplateError('images need transformers; install twinkle-grpc[model]') from None
        return module.Qwen2VLImageProcessorPil(**{key: settings[key] for key in _ARGUMENTS if key in settings})

    @property
    def _channels(self) -> int:
        side = int(self._processor.patch_size)
        return self.spec.patch_width // (self.spec.temporal_patch_size * side * side)

    def _patches(self, image: Image.Image, place: str) -> tuple[npt.NDArray[np.float32], Grid]:
        try:
            read = self._processor.preprocess([image], return_tensors='np')
        except ValueError as error:
            raise InvalidTrajectory(place, f'is refused by the image processor: {error}') from None
        frames, rows, columns = (int(side) for side in read['image_grid_thw'][0])
        return np.asarray(read['pixel_values'], np.float32), (frames, rows, columns)
