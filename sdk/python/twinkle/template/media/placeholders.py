"""Find the images, videos and audio of a chat, in the order of their placeholders.

The placeholders `<image>`, `<video>` and `<audio>` in a text refer to the items of the trajectory's `images`, `videos`
and `audios`, in order. Parts of a message can also contain media. Placeholders in assistant messages are plain text.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from twinkle.template.errors import InvalidTrajectory

MEDIA_FIELDS = {'image': 'images', 'video': 'videos', 'audio': 'audios'}
"""Map from the kind of media to the field of a trajectory."""
_PLACEHOLDER = re.compile('<(image|video|audio)>')
_PART_KINDS = {'image': 'image', 'image_url': 'image', 'video': 'video', 'audio': 'audio', 'audio_url': 'audio'}
"""Map from the type of a message part to the kind of media."""
_SOURCE_KEYS = ('url', 'path', 'bytes', 'base64')
"""Keys under which a part may contain its media, in addition to the name of its type."""


@dataclass(frozen=True)
class FoundMedia:
    """One image, video or audio clip of a chat."""

    kind: str
    """'image', 'video' or 'audio'."""
    source: Any
    """The caller's value: a path, bytes, a `data:` URL, a decoded image and so on."""
    field_path: str
    """Path of the field, such as `messages[0].content[1]` or `images[0]`."""


@dataclass
class _Search:
    """State of the search in one chat."""

    given: Mapping[str, Sequence[Any]]
    """The items in the trajectory's media fields, by kind."""
    used: dict[str, int] = field(default_factory=dict[str, int])
    """Number of items of `given` that placeholders have used so far, by kind."""
    found: list[FoundMedia] = field(default_factory=list[FoundMedia])

    def use_next(self, kind: str, field_path: str) -> None:
        """Use the trajectory's next item of this kind for the placeholder at `field_path`."""
        index = self.used.get(kind, 0)
        name = MEDIA_FIELDS[kind]
        if index >= len(self.given[kind]):
            problem = f'refers to item {index + 1} of {name}, but there are {len(self.given[kind])}'
            raise InvalidTrajectory(field_path, problem)
        self.used[kind] = index + 1
        self.found.append(FoundMedia(kind, self.given[kind][index], f'{name}[{index}]'))


def find_media(trajectory: Mapping[str, Any]) -> tuple[list[Any], list[FoundMedia]]:
    """Return the messages with one placeholder per image, video and audio clip, and the media in order.

    Malformed messages are returned unchanged; `check_trajectory` refuses them.

    Raises:
        InvalidTrajectory: the numbers of placeholders and media differ, or a part is malformed.
    """
    search = _Search({kind: _given(trajectory, name) for kind, name in MEDIA_FIELDS.items()})
    messages: list[Any] = []
    given: Any = trajectory.get('messages') or ()
    for index, message in enumerate(cast('Sequence[Any]', given)):
        messages.append(_searched(message, f'messages[{index}].content', search))
    for kind, sources in search.given.items():
        used_count = search.used.get(kind, 0)
        if used_count < len(sources):
            name = MEDIA_FIELDS[kind]
            raise InvalidTrajectory(f'{name}[{used_count}]', f'has no placeholder; insert <{kind}> into a message')
    return messages, search.found


def with_placeholders(trajectory: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat with all media in the trajectory's fields and placeholders in the texts.

    Raises:
        InvalidTrajectory: as in `find_media`.
    """
    messages, found = find_media(trajectory)
    changed: dict[str, Any] = {**trajectory, 'messages': messages}
    for kind, name in MEDIA_FIELDS.items():
        sources = [media.source for media in found if media.kind == kind]
        if sources or name in changed:
            changed[name] = sources
    return changed


def _given(trajectory: Mapping[str, Any], name: str) -> Sequence[Any]:
    sources: Any = trajectory.get(name)
    if sources is None:
        return ()
    if isinstance(sources, str | bytes | Mapping) or not isinstance(sources, Sequence):
        raise InvalidTrajectory(name, f'must be a list, got {type(cast(Any, sources)).__name__}')
    return cast('Sequence[Any]', sources)


def _searched(message: Any, path: str, search: _Search) -> Any:
    """Return a message whose content is text with placeholders, and add its media to the search."""
    if not isinstance(message, Mapping):
        return message
    given = cast('Mapping[str, Any]', message)
    content: Any = given.get('content')
    if isinstance(content, str):
        if given.get('role') != 'assistant':
            _use_all(content, path, search)
        return given
    if isinstance(content, bytes) or not isinstance(content, Sequence):
        return given
    parts = cast('Sequence[Any]', content)
    is_text = not any(_kind_of(part) for part in parts)
    if given.get('role') == 'assistant' or (is_text and any(_text_of(part) is None for part in parts)):
        return given
    pieces = [_part(part, f'{path}[{index}]', search) for index, part in enumerate(parts)]
    return {**given, 'content': ''.join(pieces)}


def _use_all(text: str, path: str, search: _Search) -> None:
    for match in _PLACEHOLDER.finditer(text):
        search.use_next(match[1], path)


def _kind_of(part: Any) -> str | None:
    kind = cast('Mapping[str, Any]', part).get('type') if isinstance(part, Mapping) else None
    return _PART_KINDS.get(kind) if isinstance(kind, str) else None


def _text_of(part: Any) -> str | None:
    fields: Mapping[str, Any] = cast('Mapping[str, Any]', part) if isinstance(part, Mapping) else {}
    text: Any = fields.get('text') if fields.get('type') == 'text' else None
    return text if isinstance(text, str) else None


def _part(part: Any, path: str, search: _Search) -> str:
    kind = _kind_of(part)
    fields: Mapping[str, Any] = cast('Mapping[str, Any]', part) if isinstance(part, Mapping) else {}
    if kind is None:
        text = _text_of(fields)
        if text is None:
            known = ', '.join(['text', *_PART_KINDS])
            raise InvalidTrajectory(path, f'must have one of the types {known}, got {fields.get("type")!r}')
        _use_all(text, path, search)
        return text
    names = (str(fields['type']), kind, *_SOURCE_KEYS)
    sources = [_source(name, fields[name]) for name in dict.fromkeys(names) if fields.get(name) is not None]
    if len(sources) > 1:
        raise InvalidTrajectory(path, f'contains its {kind} more than once; give only one of {", ".join(names)}')
    if not sources:
        search.use_next(kind, path)
    else:
        source = {**fields, kind: sources[0]} if kind == 'video' else sources[0]
        search.found.append(FoundMedia(kind, source, path))
    return f'<{kind}>'


def _source(name: str, given: Any) -> Any:
    # A bare base64 string would be mistaken for a path.
    return {name: given} if name == 'base64' else given
