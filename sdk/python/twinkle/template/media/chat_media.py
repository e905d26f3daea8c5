"""Process the images, videos and audio of a chat: placeholders, loading, media tokens and position ids."""

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

_MAX_STEP_SECONDS = 10**6
"""Maximum duration of one temporal step, about 12 days; the resulting positions fit in 32 bits."""
Load = Callable[[Any, str], Any]
"""Function `load(source, field_path)` that decodes one item of media; `field_path` is for error messages."""


class Reader(Protocol):
    """Converts the images, videos or audio of one model; implemented by `VisionReader` and `AudioReader`."""

    @property
    def spec(self) -> MediaSpec:
        """Media settings from the model's configuration."""
        ...

    @property
    def reserved(self) -> tuple[str, ...]:
        """The media tokens as strings, which messages must not contain."""
        ...

    def placeholder_text(self, kind: MediaKind) -> str:
        """Return the text that replaces one placeholder of this kind in a rendered chat."""
        ...

    def read(self, kind: MediaKind, opened: Any, field_path: str) -> ReadMedia:
        """Convert one decoded item to arrays.

        Raises:
            InvalidTrajectory: the item does not fit the model. The error names `field_path`.
            TemplateError: transformers is not installed, or the model's processor is not supported.
        """
        ...

    def fields(self, media: Sequence[ReadMedia]) -> InputFeature:
        """Return the media fields of a feature for at least one item."""
        ...


@dataclass(frozen=True, kw_only=True)
class ChatMedia:
    """Processes the media in chats of one model.

    Args:
        reader: converts media for the model.
        limits: limits per chat; here only `max_items` is used. Default: `MediaLimits()`.
    """

    reader: Reader
    limits: MediaLimits = field(default_factory=MediaLimits)

    def formatted(self, trajectory: Any) -> Any:
        """Return a chat with all media in `images`, `videos` and `audios`, and placeholders in the texts.

        Malformed chats are returned unchanged; `check_trajectory` refuses them.

        Raises:
            InvalidTrajectory: placeholders and media do not match, or a text contains a media token.
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
                    problem = f'contains the media token {token}; remove it'
                    raise InvalidTrajectory(f'messages[{index}].content', problem)
        return changed

    def with_media_tokens(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return messages whose placeholders are replaced by the model's media tokens, except in assistant messages."""
        return [message if message['role'] == 'assistant' else self._with_media_tokens(message) for message in messages]

    def read(self, given: Mapping[str, Any], chat: Mapping[str, Any], load: Mapping[str, Load]) -> list[ReadMedia]:
        """Load and convert the media of a chat, in order.

        Args:
            given: the caller's chat; error messages name its fields.
            chat: the same chat after `formatted`.
            load: function that decodes each kind of media.

        Raises:
            InvalidTrajectory: an item cannot be read, or there are too many items. The error names the field.
            TemplateError: transformers is not installed, or the model's processor is not supported.
        """
        found, named = find_media(chat)[1], find_media(given)[1]
        if len(found) > self.limits.max_items:
            problem = f'contain {len(found)} images, videos and clips, more than max_items {self.limits.max_items}'
            raise InvalidTrajectory('messages', problem)
        places = [media.field_path for media in (named if len(named) == len(found) else found)]
        return [self._read(media, field_path, load) for media, field_path in zip(found, places, strict=True)]

    def expanded(self, tokens: TokenizedText, media: Sequence[ReadMedia]) -> TokenizedText:
        """Repeat each media token, with its offsets, as many times as its item needs.

        Raises:
            TemplateError: the rendered chat contains more or fewer media tokens than items.
        """
        spec, ids = self.reader.spec, np.asarray(tokens.token_ids, np.int64)
        counts = np.ones(len(ids), np.int64)
        for kind in spec.kinds:
            places = np.flatnonzero(ids == spec.token_id(kind))
            own = [spec.token_count(item.grid) for item in media if item.kind == kind]
            if len(own) != len(places):
                raise TemplateError(
                    f'the chat template rendered {len(places)} tokens of kind {kind} for {len(own)} items'
                )
            counts[places] = own
        offsets = np.repeat(np.asarray(tokens.offsets, np.int64).reshape(-1, 2), counts, axis=0)
        return TokenizedText(np.repeat(ids, counts).tolist(), [(int(begin), int(end)) for begin, end in offsets])

    def _with_media_tokens(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        content = message['content']
        for kind in self.reader.spec.kinds:
            content = content.replace(f'<{kind}>', self.reader.placeholder_text(kind))
        return {**message, 'content': content}

    def _read(self, media: FoundMedia, field_path: str, load: Mapping[str, Load]) -> ReadMedia:
        if media.kind not in self.reader.spec.kinds:
            raise InvalidTrajectory(field_path, f'is of kind {media.kind}, which the model does not support; remove it')
        return self.reader.read(media.kind, load[media.kind](media.source, field_path), field_path)


def with_media_positions(feature: InputFeature, spec: VisionSpec) -> InputFeature:
    """Return a copy of a feature with position ids int32 [3, T] (time, height, width).

    A feature without images and videos is returned unchanged, without a copy.

    Raises:
        InvalidFeature: the tokens do not match the images and videos, or a field has a wrong shape or type.
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
    """Return the seconds per temporal step of each video; empty if the feature does not have them."""
    name = 'second_per_grid_ts'
    if feature.get(name) is None:
        return []
    values = _numbers(feature, name)
    is_number = values.shape == (video_count,) and values.dtype.kind in 'iuf'
    if not is_number or not ((values > 0) & (values <= _MAX_STEP_SECONDS)).all():
        problem = f'must be one duration in seconds per video ({video_count}), above 0 and at most {_MAX_STEP_SECONDS}'
        raise InvalidFeature(name, problem)
    return [float(one) for one in values]


def _numbers(feature: InputFeature, name: str) -> npt.NDArray[Any]:
    try:
        return np.asarray(feature.get(name))
    except (ValueError, TypeError, RuntimeError):
        raise InvalidFeature(name, 'must be an array of numbers with rows of equal length') from None
