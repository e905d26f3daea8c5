"""Convert audio clips to mel spectrograms with the model's own feature extractor."""

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
"""Settings in `preprocessor_config.json` that are passed to the feature extractor."""
_OPEN, _CLOSE = '<|audio_bos|>', '<|audio_eos|>'
"""Delimiters of a clip's tokens, the same as in Qwen2-Audio's processor."""


class AudioReader:
    """Converts audio clips with the feature extractor in a model's folder.

    Args:
        spec: audio settings from the model's configuration.
        folder: the model's folder.
        tokenizer: the model's tokenizer.

    Raises:
        TemplateError: the tokenizer lacks an audio token.

    Concurrency: safe to share between threads.
    """

    def __init__(self, spec: AudioSpec, folder: Path, tokenizer: ChatTokenizer) -> None:
        self.spec = spec
        self._folder = folder
        self._piece = tokenizer.decode([spec.audio_token_id])
        self._placeholder_text = f'{_OPEN}{self._piece}{_CLOSE}'
        if any(tokenizer.token_id(name) is None for name in (self._piece, _OPEN, _CLOSE)):
            raise TemplateError(f'the tokenizer in {folder.name} lacks audio tokens; it needs {self._placeholder_text}')

    def placeholder_text(self, kind: MediaKind) -> str:
        """Return the text that replaces one placeholder in a rendered chat."""
        del kind
        return self._placeholder_text

    @property
    def reserved(self) -> tuple[str, ...]:
        """Text of the audio token; messages must not contain it, because the model would read it as audio."""
        return (self._piece,)

    def read(self, kind: MediaKind, opened: Sound, field_path: str) -> ReadMedia:
        """Return the mel spectrogram of a clip.

        Raises:
            InvalidTrajectory: the clip is too short or too long, or its sampling rate is not the model's.
            TemplateError: transformers is not installed, or the model's feature extractor is not supported.
        """
        rate = int(self._extractor.sampling_rate)
        if opened.rate != rate:
            problem = f'has {opened.rate} samples per second, but the model needs {rate}; resample it'
            raise InvalidTrajectory(field_path, problem)
        if len(opened.samples) > self._extractor.n_samples:
            seconds = self._extractor.n_samples / rate
            problem = f'has {len(opened.samples) / rate:.1f} seconds, more than the maximum of {seconds:.1f}'
            raise InvalidTrajectory(field_path, problem)
        read = self._extractor(
            [opened.samples], sampling_rate=rate, padding='max_length', return_attention_mask=True, return_tensors='np'
        )
        frame_count = int(np.asarray(read['attention_mask'])[0].sum())
        if frame_count < 3:
            raise InvalidTrajectory(field_path, f'is too short: it has {frame_count} frames, but the model needs 3')
        frames_FM = np.ascontiguousarray(np.asarray(read['input_features'], np.float32)[0].T)
        return ReadMedia(kind, frames_FM, (frame_count, len(frames_FM), 1), 0.0)

    def fields(self, media: Sequence[ReadMedia]) -> InputFeature:
        """Return `input_features` float32 [N, M, F] and `feature_attention_mask` int32 [N, F] of N clips.

        M is the number of mel bands and F the number of frames.
        """
        frame_counts = np.asarray([item.grid[0] for item in media])
        fields = InputFeature()
        fields['input_features'] = np.stack([item.patches_PC.T for item in media])
        fields['feature_attention_mask'] = self._mask(frame_counts)
        return fields

    def _mask(self, frame_counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        return (np.arange(self.spec.frame_count) < frame_counts[:, None]).astype(np.int32)

    @cached_property
    def _extractor(self) -> Any:
        """The feature extractor of transformers, loaded on first use."""
        settings: dict[str, Any] = json.loads((self._folder / 'preprocessor_config.json').read_text())
        name = settings.get('feature_extractor_type')
        if name != 'WhisperFeatureExtractor':
            raise TemplateError(
                f'{self._folder.name} has the feature extractor {name}; only WhisperFeatureExtractor is supported'
            )
        try:
            module = importlib.import_module('transformers.models.whisper.feature_extraction_whisper')
        except ImportError:
            raise TemplateError('audio needs transformers; install twinkle-grpc[model]') from None
        extractor = module.WhisperFeatureExtractor(**{key: settings[key] for key in _ARGUMENTS if key in settings})
        if extractor.nb_max_frames != self.spec.frame_count:
            raise TemplateError(
                f'the feature extractor in {self._folder.name} gives {extractor.nb_max_frames} frames per clip, '
                f'but the model needs {self.spec.frame_count}'
            )
        return extractor
