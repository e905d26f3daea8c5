"""What a template does with images, videos and audio: the names that its users call and override."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from twinkle.data_format import InputFeature, Trajectory, VisionSpec, media_spec
from twinkle.template.errors import InvalidFeature
from twinkle.template.media.chat_media import ChatMedia, Reader, placed
from twinkle.template.media.hearing import AudioReader
from twinkle.template.media.loading import MediaLoader, Video
from twinkle.template.media.read_media import ReadMedia
from twinkle.template.media.sound import Sound
from twinkle.template.media.vision import VisionReader
from twinkle.template.tokenizer import ChatTokenizer


class ReadsMedia:
    """The part of a template that reads images and videos.

    Args:
        folder: of the model; None: its images are not read.
        tokenizer: of the model.
    """

    def __init__(self, folder: Path | None, tokenizer: ChatTokenizer) -> None:
        reader = None if folder is None else _reader(folder, tokenizer)
        self._media = None if reader is None else ChatMedia(reader=reader)
        self.media_loader = MediaLoader()
        """Opens images and videos, within limits."""

    @property
    def is_mm(self) -> bool:
        """Whether images, videos or audio are understood: the model reads them, and its folder says how."""
        return self._media is not None

    def preprocess_image(self, image: Any, place: str = 'images[0]') -> Any:
        """Return an image as RGB, a Pillow image; override it to change what the model sees.

        Args:
            image: a path, bytes, `data:` address, Pillow image or uint8 array; see `docs/templates.md`.
            place: of the field, for refusals.

        Raises:
            InvalidTrajectory: names the field.
        """
        return self.media_loader.image(image, place)

    def preprocess_images(self, images: Sequence[Any]) -> list[Any]:
        """Return `preprocess_image` of each."""
        return [self.preprocess_image(image, f'images[{index}]') for index, image in enumerate(images)]

    def preprocess_video(self, video: Any, place: str = 'videos[0]') -> Video:
        """Return a video as frames: from a list of images, or `{'video': [...], 'fps': 2.0}`. Raises as for images."""
        return self.media_loader.video(video, place)

    def preprocess_videos(self, videos: Sequence[Any]) -> list[Video]:
        """Return `preprocess_video` of each."""
        return [self.preprocess_video(video, f'videos[{index}]') for index, video in enumerate(videos)]

    def preprocess_audio(self, audio: Any, place: str = 'audios[0]') -> Sound:
        """Return a clip as numbers: from a WAV file, or an array with its rate. Raises as for images."""
        return self.media_loader.sound(audio, place)

    def preprocess_audios(self, audios: Sequence[Any]) -> list[Sound]:
        """Return `preprocess_audio` of each."""
        return [self.preprocess_audio(audio, f'audios[{index}]') for index, audio in enumerate(audios)]

    def set_mm_position_ids(self, feature: InputFeature) -> InputFeature:
        """Return the feature with positions [3, T] in time, height and width, where it has images or videos.

        Raises:
            InvalidFeature: its tokens are not those of its images and videos, or the model reads none.
        """
        spec = None if self._media is None else self._media.reader.spec
        if not isinstance(spec, VisionSpec):
            raise InvalidFeature('position_ids', 'are of time, height and width for models that read images alone')
        return placed(feature, spec)

    def _read_media(self, given: Mapping[str, Any], chat: Trajectory) -> list[ReadMedia]:
        if self._media is None:
            return []
        load = {'image': self.preprocess_image, 'video': self.preprocess_video, 'audio': self.preprocess_audio}
        return self._media.read(given, chat, load)

    def _with_media(self, feature: InputFeature, media: Sequence[ReadMedia]) -> InputFeature:
        if self._media is None or not media:
            return feature
        feature.update(self._media.reader.fields(media))
        return self.set_mm_position_ids(feature) if self._media.reader.spec.has_axes else feature


def _reader(folder: Path, tokenizer: ChatTokenizer) -> Reader | None:
    """Return what reads the media of a model's folder; None where it reads text alone, or has no processor."""
    if not (folder / 'config.json').is_file() or not (folder / 'preprocessor_config.json').is_file():
        return None
    config: dict[str, Any] = json.loads((folder / 'config.json').read_text())
    spec = media_spec(config)
    if spec is None:
        return None
    if isinstance(spec, VisionSpec):
        return VisionReader.of(spec, config, folder, tokenizer)
    return AudioReader(spec, folder, tokenizer)
