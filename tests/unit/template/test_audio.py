"""Chats with audio: encoding, errors, training and sampling."""

from pathlib import Path

import numpy as np
import pytest
from transformers.models.whisper.feature_extraction_whisper import WhisperFeatureExtractor

from fixtures.tiny_audio import RATE, build_tiny_audio, sound, wav
from fixtures.tiny_vision import build_tiny_vision, picture
from twinkle.data_format import LoraConfig, SamplingParams
from twinkle.model import TransformersModel
from twinkle.processor import InvalidFeatures
from twinkle.sampler import TorchSampler
from twinkle.template import InvalidFeature, InvalidTrajectory, Template

PITCHES = {'low': 300.0, 'high': 3000.0}


@pytest.fixture(scope='session')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny audio-language model; read-only."""
    return build_tiny_audio(tmp_path_factory.mktemp('audio') / 'tiny')


@pytest.fixture(scope='session')
def template(folder: Path) -> Template:
    """The template of the tiny model; read-only."""
    return Template(str(folder))


def chat(content, answer='low', **fields):
    """Return a chat with one question and one answer."""
    return {'messages': [{'role': 'user', 'content': content}, {'role': 'assistant', 'content': answer}], **fields}


def test_a_clip_gets_one_token_per_audio_embedding(template, folder, tmp_path):
    """The mel bands of each kind of source equal those of transformers, and each audio embedding has one token."""
    clip = sound(1.0)
    file = wav(clip)
    (tmp_path / 'clip.wav').write_bytes(file)
    feature = template.encode(chat('Hear <audio>!', audios=[file]))
    extractor = WhisperFeatureExtractor.from_pretrained(folder)
    samples = np.frombuffer(file[44:], '<i2').astype(np.float32) / 32768
    expected = extractor(
        [samples], sampling_rate=RATE, padding='max_length', return_attention_mask=True, return_tensors='np'
    )
    np.testing.assert_allclose(feature['input_features'], expected['input_features'], atol=1e-6)
    np.testing.assert_array_equal(feature['feature_attention_mask'], expected['attention_mask'])
    frame_count = int(expected['attention_mask'].sum())
    assert (np.asarray(feature['input_ids']) == 5).sum() == ((frame_count - 1) // 2 + 1 - 2) // 2 + 1
    assert list(feature['position_ids']) == list(range(feature['length']))
    for source in (str(tmp_path / 'clip.wav'), {'array': samples, 'sampling_rate': RATE}, wav(clip, channels=2)):
        part = {'type': 'audio', 'audio': source}
        other = template.encode(chat([{'type': 'text', 'text': 'Hear '}, part, {'type': 'text', 'text': '!'}]))
        np.testing.assert_allclose(other['input_features'], feature['input_features'], atol=1e-4)


REFUSED = [
    (chat('<audio>', audios=[b'RIFF no wave']), 'audios[0]'),
    (chat('<audio>', audios=[wav(sound(1.0))[:40]]), 'audios[0]'),
    (chat('<audio>', audios=[wav(sound(1.0), rate=44100)]), 'audios[0]'),
    (chat('<audio>', audios=[wav(sound(2.5))]), 'audios[0]'),
    (chat('<audio>', audios=[{'array': np.zeros((2, 5)), 'sampling_rate': RATE}]), 'audios[0]'),
    (chat('<audio>', audios=[{'array': sound(1.0), 'sampling_rate': 0}]), 'audios[0].sampling_rate'),
    (chat('<audio>', audios=[{'array': [[0.5], [0.5, 0.1]], 'sampling_rate': RATE}]), 'audios[0]'),
    (chat('<audio>', audios=[{'array': sound(1.0) * np.nan, 'sampling_rate': RATE}]), 'audios[0]'),
    (chat('<audio>', audios=[{'array': sound(1.0).astype(np.float64) * 1e300, 'sampling_rate': RATE}]), 'audios[0]'),
    (chat('<audio>', audios=[{'array': sound(1.0) * 32767, 'sampling_rate': RATE}]), 'audios[0]'),
    (chat('<audio>', audios=[wav(sound(1.0))[:16] + b'\xff' * 4 + wav(sound(1.0))[20:]]), 'audios[0]'),
    (chat('<audio>', audios=['http://localhost/clip.wav']), 'audios[0]'),
    (chat('<image>', images=[picture(8, 8)]), 'images[0]'),
    (chat('a <|AUDIO|>'), 'messages[0].content'),
]


@pytest.mark.parametrize(('inputs', 'field'), REFUSED)
def test_unreadable_media_are_refused_by_field(template, inputs, field):
    """Damaged, remote and overlong clips, other sampling rates and images are refused with the path of their field."""
    with pytest.raises(InvalidTrajectory) as refused:
        template.encode(inputs)
    assert refused.value.field == field


def test_an_adapter_learns_to_distinguish_sounds(template, folder):
    """A trained adapter predicts the answers of two chats better with their sounds than with swapped sounds."""
    model = TransformersModel(str(folder))
    model.add_adapter_to_model('default', LoraConfig(r=8, lora_alpha=16, seed=0))
    model.set_optimizer('AdamW', lr=0.01)
    clips = [{'array': sound(0.5, pitch=pitch), 'sampling_rate': RATE} for pitch in PITCHES.values()]
    chats = [chat('<audio>', answer=name, audios=[clip]) for name, clip in zip(PITCHES, clips, strict=True)]
    features = template.batch_encode(chats)
    for _ in range(30):
        model.forward_backward(features)
        model.clip_grad_and_step(1.0)
    swapped = template.batch_encode([{**one, 'audios': [clips[1 - index]]} for index, one in enumerate(chats)])
    right, wrong = (
        sum(float(np.sum(logps)) for logps in model.forward_only(inputs)['logps']) for inputs in (features, swapped)
    )
    assert right > wrong + 2


def test_trainer_and_sampler_logprobs_agree(folder):
    """Trainer and sampler compute the same log-probabilities for tokens that are sampled after a clip."""
    prompt_chat = {'messages': [{'role': 'user', 'content': '<audio>?'}], 'audios': [wav(sound(1.0))]}
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=1, logprobs=0)
    feature = TorchSampler(str(folder)).sample(prompt_chat, params)[0].sequences[0].new_input_feature
    model = TransformersModel(str(folder))
    model.add_adapter_to_model('default', LoraConfig(r=4))
    np.testing.assert_allclose(model.forward_only([feature])['logps'][0], feature['old_logps'], atol=1e-5)


def test_mismatched_audio_fields_are_refused(template, folder, tmp_path):
    """Fields that do not match the clip or model, positions on three axes, and audio for a vision model are refused."""
    feature = template.encode(chat('<audio>', audios=[wav(sound(1.0))]))
    model = TransformersModel(str(folder))
    model.add_adapter_to_model('default', LoraConfig(r=4))
    mask = np.asarray(feature['feature_attention_mask'])
    for name, value in (
        ('input_features', feature['input_features'][:, :, :50]),
        ('feature_attention_mask', mask[:, ::-1]),
        ('feature_attention_mask', mask[:, :9]),
        ('pixel_values', np.zeros((4, 384))),
    ):
        with pytest.raises(InvalidFeatures) as refused:
            model.forward_only([{**feature, name: value}])
        assert refused.value.field == name
    with pytest.raises(InvalidFeature):
        template.set_mm_position_ids(feature)
    vision_template = Template(str(build_tiny_vision(tmp_path / 'vision')))
    with pytest.raises(InvalidTrajectory):
        vision_template.encode(chat('<audio>', audios=[wav(sound(1.0))]))
