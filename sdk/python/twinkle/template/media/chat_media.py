"""The images, videos and audio of chats on their way into features: shown, read, and given tokens and positions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from twinkle.data_format import Grid, InputFeature, MediaKind, MediaSpec, VisionSpec
from twinkle.template.errors import InvalidFeature, InvalidTrajectory, TemplateError
from twinkle.template.media.limits import MediaLimits
from twinkle.template.media.placeholders import FoundMedia, find_media, with_placeholders
from twinkle.template.media.positions import media_positions
from twinkle.template.media.read_media import ReadMedia
from twinkle.template.tokenizer import TokenizedText

_MOST_SECONDS = 10**6
"""Of a step of time: twelve days, whose positions have room in 32 bits."""
Load = Callable[[Any, str], Any]
"""Opens what a chat names: `load(source, place)`."""


class Reader(Protocol):
    """How one model's images, videos or audio are read; `VisionReader` and `AudioReader` are."""

    @property
    def spec(self) -> MediaSpec:
        """How the model's configuration says that they are read."""
        ...

    @property
    def reserved(self) -> tuple[str, ...]:
        """Texts of tokens that no message may hold."""
        ...

    def shown(self, kind: MediaKind) -> str:
        """Return the text that stands for one of them in a rendered chat."""
        ...

    def read(self, kind: MediaKind, opened: Any, place: str) -> ReadMedia:
        """Return what was opened as numbers."""
        ...

    def fields(self, media: Sequence[ReadMedia]) -> InputFeature:
        """Return what a feature says of them; at least one."""
        ...


@dataclass(frozen=True, kw_only=True)
class ChatMedia:
    """How one model's chats show what is not text.

    Args:
        reader: of the model.
        limits: of one chat.
    """

    reader: Reader
    limits: MediaLimits = field(default_factory=MediaLimits)

    def formatted(self, trajectory: Any) -> Any:
        """Return a chat with its media in fields of their own and placeholders in its texts.

        Raises:
            InvalidTrajectory: placeholders and media do not match, or a text holds a token that stands for media.
        """
        if not isinstance(trajectory, Mapping):
            return trajectory
        given = cast('Mapping[str, Any]', trajectory)
        if not isinstance(given.get('messages'), Sequence) or isinstance(given['messages'], str | bytes):
            return given
        changed = with_placeholders(given)
        for index, message in enumerate(cast('list[Any]', changed['messages'])):
            text = str(cast('Mapping[str, Any]', message).get('content', '')) if isinstance(message, Mapping) else ''
            for token in self.reader.reserved:
                if token in text:
                    raise InvalidTrajectory(f'messages[{index}].content', f'holds {token}, which stands for pixels')
        return changed

    def shown(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return messages with the model's own tokens in the place of placeholders."""
        return [message if message['role'] == 'assistant' else self._shown(message) for message in messages]

    def read(self, given: Mapping[str, Any], chat: Mapping[str, Any], load: Mapping[str, Load]) -> list[ReadMedia]:
        """Return the media of a chat, in order.

        Args:
            given: the chat as it came, whose fields refusals name.
            chat: the same, formatted.
            load: what opens each kind.

        Raises:
            InvalidTrajectory: names the field that cannot be read.
        """
        found, named = find_media(chat)[1], find_media(given)[1]
        if len(found) > self.limits.max_items:
            problem = f'shows {len(found)} images, videos and clips, more than max_items {self.limits.max_items}'
            raise InvalidTrajectory('messages', problem)
        places = [media.place for media in (named if len(named) == len(found) else found)]
        return [self._read(media, place, load) for media, place in zip(found, places, strict=True)]

    def expanded(self, tokens: TokenizedText, media: Sequence[ReadMedia]) -> TokenizedText:
        """Return the tokens of a chat with as many for each image and video as it has.

        Raises:
            TemplateError: the chat template shows more of them than there are, or fewer.
        """
        spec, ids = self.reader.spec, np.asarray(tokens.token_ids, np.int64)
        counts = np.ones(len(ids), np.int64)
        for kind in spec.kinds:
            places = np.flatnonzero(ids == spec.token_id(kind))
            own = [spec.token_count(item.grid) for item in media if item.kind == kind]
            if len(own) != len(places):
                raise TemplateError(f'the chat template shows {len(places)} of {len(own)} {kind}s')
            counts[places] = own
        offsets = np.repeat(np.asarray(tokens.offsets, np.int64).reshape(-1, 2), counts, axis=0)
        return TokenizedText(np.repeat(ids, counts).tolist(), [(int(begin), int(end)) for begin, end in offsets])

    def _shown(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        content = message['content']
        for kind in self.reader.spec.kinds:
            content = content.replace(f'<{kind}>', self.reader.shown(kind))
        return {**message, 'content': content}

    def _read(self, media: FoundMedia, place: str, load: Mapping[str, Load]) -> ReadMedia:
        if media.kind not in self.reader.spec.kinds:
            raise InvalidTrajectory(place, f'is {media.kind}, which the model does not read; leave it out')
        return self.reader.read(media.kind, load[media.kind](media.source, place), place)


def placed(feature: InputFeature, spec: VisionSpec) -> InputFeature:
    """Return a feature with positions in time, height and width; one without media as it is.

    Raises:
        InvalidFeature: its tokens are not those of its images and videos.
    """
    images, videos = (_grids(feature, name) for name in ('image_grid_thw', 'video_grid_thw'))
    if not images and not videos:
        return feature
    ids = _numbers(feature, 'input_ids')
    if ids.ndim != 1 or ids.dtype.kind not in 'iu':
        raise InvalidFeature('input_ids', f'must be integers [T], got {ids.dtype} {list(ids.shape)}')
    result, seconds = InputFeature(**feature), _seconds(feature, len(videos))
    try:
        positions = media_positions(ids, spec, image_grids=images, video_grids=videos, seconds=seconds)
    except ValueError as error:
        raise InvalidFeature('input_ids', str(error)) from None
    result['position_ids'] = positions
    return result


def _grids(feature: InputFeature, name: str) -> list[Grid]:
    if feature.get(name) is None:
        return []
    rows = _numbers(feature, name)
    if rows.ndim != 2 or rows.shape[1] != 3 or rows.dtype.kind not in 'iu' or (rows < 1).any():
        raise InvalidFeature(name, f'must be integers [N, 3] of at least 1, got {rows.dtype} {list(rows.shape)}')
    return [(int(frames), int(height), int(width)) for frames, height, width in rows]


def _seconds(feature: InputFeature, video_count: int) -> list[float]:
    """Return what a step of each video's time takes; nothing where the feature does not say it."""
    name = 'second_per_grid_ts'
    if feature.get(name) is None:
        return []
    values = _numbers(feature, name)
    is_number = values.shape == (video_count,) and values.dtype.kind in 'iuf'
    if not is_number or not ((values > 0) & (values <= _MOST_SECONDS)).all():
        raise InvalidFeature(name, f'must be seconds [{video_count}], above 0 and at most {_MOST_SECONDS}')
    return [float(one) for one in values]


def _numbers(feature: InputFeature, name: str) -> npt.NDArray[Any]:
    try:
        return np.asarray(feature.get(name))
    except (ValueError, TypeError, RuntimeError):
        raise InvalidFeature(name, 'must be an array of numbers whose rows are equally long') from None
