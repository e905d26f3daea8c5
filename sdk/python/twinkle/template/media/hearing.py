"""The model's own feature extractor: from sound to mel bands, and how many tokens stand for a clip."""

import importlib
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from twinkle.data_format import AudioSpec, InputFeature, MediaKind
from twinkle.template.errors import InvalidTrajectory, TemplateError
from twinkle.template.media.read_media import ReadMedia
from twinkle.template.media.sound import Sound
from twinkle.template.tokenizer import ChatTokenizer

_ARGUMENTS = ('chunk_length', 'dither', 'feature_size', 'hop_length', 'n_fft', 'padding_value', 'sampling_rate')
_OPEN, _CLOSE = '<|audio_bos|>', '<|audio_eos|>'
"""Around the tokens of a clip, as Qwen2-Audio's processor writes them."""


class AudioReader:
    """What a model's folder says of its audio.

    Concurrency: safe to share between threads.
    """

    def __init__(self, spec: AudioSpec, folder: Path, tokenizer: ChatTokenizer) -> None:
        self.spec = spec
        self._folder = folder
        self._piece = tokenizer.decode([spec.audio_token_id])
        self._shown = f'{_OPEN}{self._piece}{_CLOSE}'
        if any(tokenizer.token_id(name) is None for name in (self._piece, _OPEN, _CLOSE)):
            raise TemplateError(f'{folder.name} lacks tokens of {self._shown}, which its audio needs')

    def shown(self, kind: MediaKind) -> str:
        """Return the text that stands for a clip in a rendered chat."""
        del kind
        return self._shown

    @property
    def reserved(self) -> tuple[str, ...]:
        """Texts of tokens that no message may hold, for the model would take them for sound."""
        return (self._piece,)

    def read(self, kind: MediaKind, opened: Sound, place: str) -> ReadMedia:
        """Return a clip as mel bands.

        Raises:
            InvalidTrajectory: it has another rate than the model hears, is too short or too long.
        """
        rate = int(self._extractor.sampling_rate)
        if opened.rate != rate:
            raise InvalidTrajectory(place, f'has {opened.rate} samples a second, the model hears {rate}; resample it')
        if len(opened.samples) > self._extractor.n_samples:
            seconds = self._extractor.n_samples / rate
            raise InvalidTrajectory(place, f'has {len(opened.samples) / rate:.1f} seconds, more than {seconds:.1f}')
        read = self._extractor(
            [opened.samples], sampling_rate=rate, padding='max_length', return_attention_mask=True, return_tensors='np'
        )
        heard = int(np.asarray(read['attention_mask'])[0].sum())
        if heard < 3:
            raise InvalidTrajectory(place, 'is too short to be heard')
        frames_FM = np.ascontiguousarray(np.asarray(read['input_features'], np.float32)[0].T)
        return ReadMedia(kind, frames_FM, (heard, len(frames_FM), 1), 0.0)

    def fields(self, media: Sequence[ReadMedia]) -> InputFeature:
        """Return what a feature says of its clips."""
        heard = np.asarray([item.grid[0] for item in media])
        fields = InputFeature()
        fields['input_features'] = np.stack([item.patches_PC.T for item in media])
        fields['feature_attention_mask'] = self._mask(heard)
        return fields

    def _mask(self, heard: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        return (np.arange(self.spec.frame_count) < heard[:, None]).astype(np.int32)

    @cached_property
    def _extractor(self) -> Any:
        """The extractor of transformers; loaded with the first clip."""
        settings: dict[str, Any] = json.loads((self._folder / 'preprocessor_config.json').read_text())
        name = settings.get('feature_extractor_type')
        if name != 'WhisperFeatureExtractor':
            raise TemplateError(f"{self._folder.name} has the feature extractor {name}; known is Whisper's")
        try:
            module = importlib.import_module('transformers.models.whisper.feature_extraction_whisper')
        except ImportError:
            raise TemplateError('audio needs transformers; install twinkle-grpc[model]') from None
        extractor = module.WhisperFeatureExtractor(**{key: settings[key] for key in _ARGUMENTS if key in settings})
        if extractor.nb_max_frames != self.spec.frame_count:
            raise TemplateError(f"{self._folder.name} extracts {extractor.nb_max_frames} frames of its model's clips")
        return extractor
