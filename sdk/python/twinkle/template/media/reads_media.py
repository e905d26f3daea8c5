"""What a template does with images and videos: the names that its users call and override."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from twinkle.data_format import InputFeature, Trajectory
from twinkle.template.errors import InvalidFeature
from twinkle.template.media.chat_media import ChatMedia, placed
from twinkle.template.media.loading import MediaLoader, Video
from twinkle.template.media.vision import ReadMedia, VisionReader
from twinkle.template.tokenizer import ChatTokenizer


class ReadsMedia:
    """The part of a template that reads images and videos.

    Args:
        folder: of the model; None: its images are not read.
        tokenizer: of the model.
    """

    def __init__(self, folder: Path | None, tokenizer: ChatTokenizer) -> None:
        reader = None if folder is None else VisionReader.of(folder, tokenizer)
        self._media = None if reader is None else ChatMedia(reader=reader)
        self.media_loader = MediaLoader()
        """Opens images and videos, within limits."""

    @property
    def is_mm(self) -> bool:
        """Whether images and videos are understood: the model reads them, and its folder says how."""
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

    def set_mm_position_ids(self, feature: InputFeature) -> InputFeature:
        """Return the feature with positions [3, T] in time, height and width, where it has images or videos.

        Raises:
            InvalidFeature: its tokens are not those of its images and videos, or the model reads none.
        """
        if self._media is None:
            raise InvalidFeature('position_ids', 'are of time, height and width for models that read images alone')
        try:
            return placed(feature, self._media.reader.spec)
        except ValueError as error:
            raise InvalidFeature('input_ids', str(error)) from None

    def _read_media(self, given: Mapping[str, Any], chat: Trajectory) -> list[ReadMedia]:
        if self._media is None:
            return []
        return self._media.read(given, chat, {'image': self.preprocess_image, 'video': self.preprocess_video})

    def _with_media(self, feature: InputFeature, media: Sequence[ReadMedia]) -> InputFeature:
        if self._media is None or not media:
            return feature
        feature.update(self._media.fields(media))
        return self.set_mm_position_ids(feature)
