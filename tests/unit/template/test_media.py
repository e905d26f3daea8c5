"""Chats with images and videos: encoding, positions, limits and errors."""

import base64
import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from fixtures.tiny_vision import build_tiny_vision, picture, pixels
from twinkle.template import ExampleTooLong, InvalidFeature, InvalidTrajectory, Qwen3_5Template, Template
from twinkle.template.media import MediaLimits, MediaLoader

IMAGE, VIDEO = 5, 6
"""Token ids that stand for image and video embeddings."""


@pytest.fixture(scope='session')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny vision-language model; read-only."""
    return build_tiny_vision(tmp_path_factory.mktemp('vision') / 'tiny')


@pytest.fixture(scope='session')
def template(folder: Path) -> Template:
    """The template of the tiny model; read-only."""
    return Template(str(folder))


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    """Return the bytes of an image file."""
    content = io.BytesIO()
    image.save(content, kind, **options)
    return content.getvalue()


def png(image: Image.Image) -> bytes:
    """Return the bytes of a PNG file."""
    return encoded(image, 'PNG')


def chat(content, **fields):
    """Return a chat with one question and one answer."""
    messages = [{'role': 'user', 'content': content}, {'role': 'assistant', 'content': 'a cat'}]
    return {'messages': messages, **fields}


def test_a_placeholder_gets_one_token_per_image_embedding(template, folder):
    """The pixels equal those of transformers, each image embedding has a token, and only the answer is labelled."""
    image = picture(50, 34)
    feature = template.encode(chat('Look: <image>. What?', images=[image]))
    processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    expected = processor.preprocess([image], return_tensors='np')
    np.testing.assert_array_equal(feature['pixel_values'], expected['pixel_values'])
    np.testing.assert_array_equal(feature['image_grid_thw'], expected['image_grid_thw'])
    ids = np.asarray(feature['input_ids'])
    assert (ids == IMAGE).sum() == np.prod(expected['image_grid_thw']) // 4 == 6
    assert not (np.asarray(feature['labels'])[ids == IMAGE] != -100).any()
    answer = np.asarray(feature['labels'])
    assert template.decode([one for one in answer if one != -100]) == 'a cat<|im_end|>'
    plain = template.encode(chat('Look: . What?'))
    assert list(plain['position_ids']) == list(range(plain['length']))
    assert 'pixel_values' not in plain


def test_parts_and_placeholders_give_equal_features(template, tmp_path):
    """An image gives the same feature in every accepted form of a message part, and through a placeholder."""
    image = picture(40, 40)
    (tmp_path / 'cat.png').write_bytes(png(image))
    data_url = 'data:image/png;base64,' + base64.b64encode(png(image)).decode()
    expected = template.encode(chat('Look: <image> So?', images=[image]))
    parts = [
        {'type': 'image', 'image': image},
        {'type': 'image', 'path': str(tmp_path / 'cat.png')},
        {'type': 'image', 'url': (tmp_path / 'cat.png').as_uri()},
        {'type': 'image', 'bytes': png(image)},
        {'type': 'image', 'image': np.asarray(image)},
        {'type': 'image', 'image': {'bytes': png(image), 'path': None}},
        {'type': 'image_url', 'image_url': {'url': data_url}},
        {'type': 'image', 'base64': data_url.partition(',')[2]},
        {'type': 'image', 'image': {'base64': data_url}},
    ]
    for part in parts:
        content = [{'type': 'text', 'text': 'Look: '}, part, {'type': 'text', 'text': ' So?'}]
        feature = template.encode(chat(content))
        for name in ('input_ids', 'labels', 'position_ids', 'pixel_values', 'image_grid_thw'):
            np.testing.assert_array_equal(feature[name], expected[name])


def test_media_keep_the_order_of_the_chat(template):
    """Placeholders and parts with their own image can be mixed; the images keep their order in the chat."""
    first, second, third = (picture(32, 32, seed=seed) for seed in range(3))
    content = [
        {'type': 'text', 'text': 'a <image>'},
        {'type': 'image', 'image': second},
        {'type': 'image'},
    ]
    mixed = template.encode(chat(content, images=[first, third]))
    plain = template.encode(chat('a <image><image><image>', images=[first, second, third]))
    np.testing.assert_array_equal(mixed['pixel_values'], plain['pixel_values'])
    reformatted = template.format_trajectory(template.format_trajectory(chat(content, images=[first, third])))
    assert reformatted['images'] == [first, second, third]


def test_positions_equal_transformers(template, folder):
    """The position ids of images and videos equal those of the model in transformers."""
    frames = [picture(32, 48, seed=seed) for seed in range(5)]
    content = 'a <image> b <video> c <image>'
    video = {'type': 'video', 'video': frames, 'fps': 1.0}
    feature = template.encode(chat(content, images=[picture(64, 32), picture(32, 64)], videos=[video]))
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder)
    ids = torch.as_tensor(np.asarray(feature['input_ids']), dtype=torch.int64)
    expected, _ = model.model.get_rope_index(
        ids[None],
        ((ids == IMAGE).int() + 2 * (ids == VIDEO).int())[None],
        image_grid_thw=torch.as_tensor(feature['image_grid_thw']),
        video_grid_thw=torch.as_tensor(feature['video_grid_thw']),
        second_per_grid_ts=torch.as_tensor(feature['second_per_grid_ts']),
    )
    np.testing.assert_array_equal(feature['position_ids'], expected[:, 0])
    assert list(feature['video_grid_thw'][0]) == [3, 6, 4]
    bare = {name: value for name, value in feature.items() if name != 'position_ids'}
    np.testing.assert_array_equal(template.set_mm_position_ids(bare)['position_ids'], feature['position_ids'])


def test_a_still_video_has_the_patches_of_its_image(template):
    """A video of equal frames has the patches of the image; different frames fill different temporal slots."""
    image, other = picture(32, 32), picture(32, 32, seed=1)
    still = template.encode(chat('<video>', videos=[[image, image]]))
    alone = template.encode(chat('<image>', images=[image]))
    np.testing.assert_array_equal(still['pixel_values_videos'], alone['pixel_values'])
    moving = template.encode(chat('<video>', videos=[[image, other]]))['pixel_values_videos'].reshape(-1, 3, 2, 64)
    second = template.encode(chat('<image>', images=[other]))['pixel_values'].reshape(-1, 3, 2, 64)
    np.testing.assert_array_equal(moving[:, :, 0], alone['pixel_values'].reshape(-1, 3, 2, 64)[:, :, 0])
    np.testing.assert_array_equal(moving[:, :, 1], second[:, :, 1])


@pytest.mark.parametrize(
    ('name', 'value'),
    [
        ('input_ids', None),
        ('input_ids', [[1, 2]]),
        ('input_ids', [1, 2]),
        ('video_grid_thw', [1, 2, 2]),
        ('video_grid_thw', [[1, -2, 2]]),
        ('video_grid_thw', [[1, 2, 2], [1]]),
        ('second_per_grid_ts', [1.0, 1.0]),
        ('second_per_grid_ts', [1e300]),
        ('second_per_grid_ts', [np.nan]),
        ('second_per_grid_ts', 'soon'),
    ],
)
def test_inconsistent_media_fields_are_refused_by_field(template, name, value):
    """The error for missing or malformed fields, or a duration out of range, names the field."""
    feature = template.encode(chat('<video>', videos=[[picture(32, 32)]]))
    assert template.set_mm_position_ids(feature)['position_ids'].shape == (3, feature['length'])
    with pytest.raises(InvalidFeature) as refused:
        template.set_mm_position_ids({**feature, name: value})
    assert refused.value.field == name


def test_sampled_tokens_continue_after_the_largest_position(template):
    """A completion keeps the prompt's pixels and continues after the largest position on every axis."""
    prompt_chat = {'messages': [{'role': 'user', 'content': '<image>?'}], 'images': [picture(96, 32)]}
    prompt = template.encode(prompt_chat, add_generation_prompt=True)
    joined = template.concat_input_feature(prompt, [40, 41])
    whole = template.set_mm_position_ids({**joined, 'position_ids': None})
    np.testing.assert_array_equal(joined['position_ids'], whole['position_ids'])
    assert joined['pixel_values'] is prompt['pixel_values']
    with pytest.raises(InvalidFeature):
        template.concat_input_feature({**prompt, 'position_ids': np.zeros((3, 2), np.int32)}, [40])


ANIMATED_GIF = encoded(picture(32, 32), 'GIF', save_all=True, append_images=[picture(32, 32, seed=1)])
BOMB = b'BM' + bytes(12) + (40).to_bytes(4, 'little') + (60000).to_bytes(4, 'little') * 2 + b'\1\0\x18\0' + bytes(24)
"""The header of a BMP file that declares 60000 by 60000 pixels."""
REFUSED = [
    (chat('<image>'), 'messages[0].content'),
    (chat('hello', images=['cat.png']), 'images[0]'),
    (chat('<image>', images=[b'no image']), 'images[0]'),
    (chat('<image>', images=[png(picture(64, 64))[:200]]), 'images[0]'),
    (chat('<image>', images=[BOMB]), 'images[0]'),
    (chat('<image>', images=['https://example.com/cat.png']), 'images[0]'),
    (chat('<image>', images=['/no/such/cat.png']), 'images[0]'),
    (chat('<image>', images=['data:image/png;base64,@@@']), 'images[0]'),
    (chat('<image>', images=[np.zeros((2, 2), np.uint8)]), 'images[0]'),
    (chat('<image>', images=[picture(900, 2)]), 'images[0]'),
    (chat('<image>', images=[17]), 'images[0]'),
    (chat('<image>', images=['http://[']), 'images[0]'),
    (chat('<image>', images=[{'base64': '/etc/hostname'}]), 'images[0]'),
    (chat('<image>', images=[Image.new('I;16', (32, 32))]), 'images[0]'),
    (chat('<image>', images=[ANIMATED_GIF]), 'images[0]'),
    (chat('<image>', images=[Image.open(io.BytesIO(ANIMATED_GIF))]), 'images[0]'),
    (chat('<image>', images='cat.png'), 'images'),
    (chat([{'type': 'image', 'url': 'http://localhost/cat.png'}]), 'messages[0].content[0]'),
    (chat([{'type': 'image', 'image': b'x', 'path': 'y'}]), 'messages[0].content[0]'),
    (
        chat([{'type': 'text', 'text': 'a'}, {'type': 'smell'}, {'type': 'image', 'image': 'x'}]),
        'messages[0].content[1]',
    ),
    (chat('<video>', videos=['film.mp4']), 'videos[0]'),
    (chat('<video>', videos=[[picture(32, 32), picture(32, 64)]]), 'videos[0][1]'),
    (chat('<video>', videos=[{'video': [picture(32, 32)], 'fps': 0}]), 'videos[0].fps'),
    (chat('<video>', videos=[{'video': [picture(32, 32)], 'fps': 1e-300}]), 'videos[0].fps'),
    (chat('<audio>', audios=[b'RIFF']), 'audios[0]'),
    (chat('what is <|image_pad|>?'), 'messages[0].content'),
]


@pytest.mark.parametrize(('invalid_chat', 'field'), REFUSED)
def test_unreadable_media_are_refused_by_field(template, invalid_chat, field):
    """Missing, surplus, damaged, remote and unknown media are refused with the path of the field."""
    with pytest.raises(InvalidTrajectory) as refused:
        template.encode(invalid_chat)
    assert refused.value.field == field


@pytest.mark.parametrize('kind', ['PNG', 'JPEG', 'WEBP', 'GIF', 'BMP'])
def test_broken_files_are_refused_or_read(kind):
    """A truncated or damaged file gives either an image or an error that names the field."""
    rng, exif = random.Random(0), Image.Exif()
    exif[274], exif[270] = 6, 'turned'
    moving = {'save_all': True, 'append_images': [picture(33, 17, seed=1)]} if kind in ('GIF', 'WEBP', 'PNG') else {}
    whole = [encoded(picture(33, 17), kind, **({'exif': exif} if kind in ('JPEG', 'WEBP', 'PNG') else {}))]
    whole += [encoded(picture(33, 17), kind, **moving)]
    outcomes = set()
    for _ in range(400):
        content = bytearray(rng.choice(whole))
        for _ in range(rng.randrange(1, 6)):
            content[rng.randrange(len(content))] = rng.choice((0, 255, rng.randrange(256)))
        content = content[: rng.choice((len(content), rng.randrange(len(content))))]
        try:
            outcomes.add(MediaLoader().image(bytes(content), 'images[0]').mode)
        except InvalidTrajectory as refused:
            outcomes.add(refused.field)
    assert outcomes == {'RGB', 'images[0]'}


@pytest.mark.parametrize('limits', [MediaLimits(max_pixels=1000), MediaLimits(max_bytes=100), MediaLimits(max_side=20)])
def test_image_limits_are_checked(limits):
    """An image above the limit of pixels, bytes or side length is refused."""
    with pytest.raises(InvalidTrajectory):
        MediaLoader(limits=limits).image(png(picture(40, 40)), 'images[0]')


def test_video_limits_are_checked(template):
    """A video above the limit of frames or of total pixels is refused."""
    frames = [picture(40, 40)] * 3
    for limits in (MediaLimits(max_frames=2), MediaLimits(max_video_pixels=4000)):
        with pytest.raises(InvalidTrajectory):
            MediaLoader(limits=limits).video(frames, 'videos[0]')


def test_paths_can_be_forbidden(tmp_path):
    """Paths and `file:` URLs are not read with `is_path_allowed=False`."""
    path = tmp_path / 'cat.png'
    path.write_bytes(png(picture(8, 8)))
    assert MediaLoader().image(str(path), 'images[0]').size == (8, 8)
    for name in (str(path), path.as_uri()):
        with pytest.raises(InvalidTrajectory):
            MediaLoader(is_path_allowed=False).image(name, 'images[0]')


def test_chats_with_images_are_never_truncated(folder):
    """A chat with images that is too long is refused, or removed with 'delete', but never truncated."""
    long = chat('<image>', images=[picture(96, 96)])
    for strategy in ('raise', 'left', 'right', 'split'):
        with pytest.raises(ExampleTooLong):
            Template(str(folder), max_length=20, truncation_strategy=strategy).encode(long)
    assert Template(str(folder), max_length=20, truncation_strategy='delete').batch_encode([long]) == []


def test_templates_without_media_refuse_images(folder, tiny_llama_dir, template):
    """Templates of text models, or with `is_media_read=False`, refuse images; there, `<image>` is plain text."""
    text_only = [Template(str(tiny_llama_dir)), Template(str(folder), is_media_read=False)]
    assert [one.is_mm for one in (*text_only, template, Qwen3_5Template(str(folder)))] == [False, False, True, True]
    for one in text_only:
        assert one.encode(chat('what does <image> mean?'))['length']
        with pytest.raises(InvalidTrajectory) as refused:
            one.encode(chat('<image>', images=[picture(8, 8)]))
        assert refused.value.field == 'images'
        with pytest.raises(InvalidFeature):
            one.set_mm_position_ids({'input_ids': [1, 2]})


def test_preprocess_image_can_be_overridden(folder):
    """A subclass can change every image before it is converted."""

    class Inverted(Template):
        """Template that inverts every image."""

        def preprocess_image(self, image, place='images[0]'):
            """Return the inverted image."""
            return Image.fromarray(255 - np.asarray(super().preprocess_image(image, place)))

    noise = pixels(32, 32)
    inverted = Inverted(str(folder)).encode(chat('<image>', images=[noise]))
    plain = Template(str(folder)).encode(chat('<image>', images=[255 - noise]))
    np.testing.assert_array_equal(inverted['pixel_values'], plain['pixel_values'])
