"""The media methods of a template, which users call and override."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from twinkle.data_format import InputFeature, Trajectory, VisionSpec, media_spec
from twinkle.template.errors import InvalidFeature
from twinkle.template.media.audio import AudioReader
from twinkle.template.media.chat_media import ChatMedia, Reader, with_media_positions
from twinkle.template.media.loading import MediaLoader, Video
from twinkle.template.media.read_media import ReadMedia
from twinkle.template.media.sound import Sound
from twinkle.template.media.vision import VisionReader
from twinkle.template.tokenizer import ChatTokenizer


class ReadsMedia:
    """Base class of templates that process images, videos and audio.

    Args:
        folder: folder of the model; None disables media.
        tokenizer: tokenizer of the model.

    Raises:
        TemplateError: the tokenizer lacks a token of the model's media.
    """

    def __init__(self, folder: Path | None, tokenizer: ChatTokenizer) -> None:
        reader = None if folder is None else _reader(folder, tokenizer)
        self._media = None if reader is None else ChatMedia(reader=reader)
        self.media_loader = MediaLoader()
        """Decodes images, videos and audio within limits."""

    @property
    def is_mm(self) -> bool:
        """Whether chats may contain media.

        This requires that `is_media_read` is True, and that the model's folder contains a supported configuration and a
        `preprocessor_config.json`.
        """
        return self._media is not None

    def preprocess_image(self, image: Any, place: str = 'images[0]') -> Any:
        """Return an RGB Pillow image; override this method to change the images that the model receives.

        Args:
            image: a path, bytes, `data:` URL, Pillow image or uint8 array [height, width, 3]; see `docs/templates.md`.
            place: path of the field, for error messages. Default: 'images[0]'.

        Raises:
            InvalidTrajectory: the image cannot be read or exceeds the limits. The error names `place`.
        """
        return self.media_loader.image(image, place)

    def preprocess_images(self, images: Sequence[Any]) -> list[Any]:
        """Return the result of `preprocess_image` for each image, in order."""
        return [self.preprocess_image(image, f'images[{index}]') for index, image in enumerate(images)]

    def preprocess_video(self, video: Any, place: str = 'videos[0]') -> Video:
        """Return a video as frames.

        Args:
            video: a list of images of equal size, or `{'video': [...], 'fps': 2.0}`; `fps` is in frames per second.
            place: path of the field, for error messages. Default: 'videos[0]'.

        Raises:
            InvalidTrajectory: the video cannot be read or exceeds the limits. The error names `place`.
        """
        return self.media_loader.video(video, place)

    def preprocess_videos(self, videos: Sequence[Any]) -> list[Video]:
        """Return the result of `preprocess_video` for each video, in order."""
        return [self.preprocess_video(video, f'videos[{index}]') for index, video in enumerate(videos)]

    def preprocess_audio(self, audio: Any, place: str = 'audios[0]') -> Sound:
        """Return an audio clip as float32 samples.

        Args:
            audio: a WAV file as a path, `data:` URL or bytes, or `{'array': ..., 'sampling_rate': ...}`.
            place: path of the field, for error messages. Default: 'audios[0]'.

        Raises:
            InvalidTrajectory: the clip cannot be read or exceeds the limits. The error names `place`.
        """
        return self.media_loader.sound(audio, place)

    def preprocess_audios(self, audios: Sequence[Any]) -> list[Sound]:
        """Return the result of `preprocess_audio` for each clip, in order."""
        return [self.preprocess_audio(audio, f'audios[{index}]') for index, audio in enumerate(audios)]

    def set_mm_position_ids(self, feature: InputFeature) -> InputFeature:
        """Return a copy of the feature with position ids int32 [3, T] in time, height and width.

        A feature without images and videos is returned unchanged.

        Raises:
            InvalidFeature: the tokens do not match the images and videos, or the model does not support images.
        """
        spec = None if self._media is None else self._media.reader.spec
        if not isinstance(spec, VisionSpec):
            raise InvalidFeature('position_ids', 'have three axes only for models that support images')
        return with_media_positions(feature, spec)

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
    """Return the media reader of a model's folder, or None for text models and folders without a processor."""
    if not (folder / 'config.json').is_file() or not (folder / 'preprocessor_config.json').is_file():
        return None
    config: dict[str, Any] = json.loads((folder / 'config.json').read_text())
    spec = media_spec(config)
    if spec is None:
        return None
    if isinstance(spec, VisionSpec):
        return VisionReader.of(spec, config, folder, tokenizer)
    return AudioReader(spec, folder, tokenizer)
