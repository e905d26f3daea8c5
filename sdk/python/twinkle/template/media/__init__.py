"""Images, videos and audio of chats: found, loaded, and turned into what a model reads. Loads no torch by itself.

`placeholders` finds them in a chat, `loading` opens them within limits, `vision` and `hearing` run the model's own
processor, `positions` says where their tokens stand, and `chat_media` joins all that for the template.
"""

from twinkle.template.media.chat_media import ChatMedia, placed
from twinkle.template.media.hearing import AudioReader
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
    'placed',
]
