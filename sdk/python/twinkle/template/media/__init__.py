"""Convert images, videos and audio in chats to model inputs. This package does not import torch.

`placeholders` finds media in a chat. `loading` and `sound` decode the media within limits. `vision` and `audio` run the
model's own processor, and `positions` computes position ids. `chat_media` combines these steps for the template.
"""

from twinkle.template.media.audio import AudioReader
from twinkle.template.media.chat_media import ChatMedia, with_media_positions
from twinkle.template.media.limits import MediaLimits
from twinkle.template.media.loading import MediaLoader, Video
from twinkle.template.media.placeholders import FoundMedia, find_media
from twinkle.template.media.positions import media_positions
from twinkle.template.media.read_media import ReadMedia
from twinkle.template.media.reads_media import ReadsMedia
from twinkle.template.media.sound import Sound
from twinkle.template.media.vision import VisionReader

__all__ = [
    'AudioReader',
    'ChatMedia',
    'FoundMedia',
    'MediaLimits',
    'MediaLoader',
    'ReadMedia',
    'ReadsMedia',
    'Sound',
    'Video',
    'VisionReader',
    'find_media',
    'media_positions',
    'with_media_positions',
]
