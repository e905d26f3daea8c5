"""Chats with images and videos as features."""

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


@pytest.fixture(scope='session')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny vision-language model; read-only."""
    return build_tiny_vision(tmp_path_factory.mktemp('vision') / 'tiny')


@pytest.fixture(scope='session')
def template(folder: Path) -> Template:
    """Its template; read-only."""
    return Template(str(folder))


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    """Return an image as a file."""
    content = io.BytesIO()
    image.save(content, kind, **options)
    return content.getvalue()


def png(image: Image.Image) -> bytes:
    """Return an image as a PNG file."""
    return encoded(image, 'PNG')


def chat(content, **fields):
    """Return a chat that asks about something and is told."""
    messages = [{'role': 'user', 'content': content}, {'role': 'assistant', 'content': 'a cat'}]
    return {'messages': messages, **fields}


def test_a_placeholder_becomes_as_many_tokens_as_the_image_has(template, folder):
    """Pixels are those of transformers' own processor; no label is of an image, and those of the answer stay."""
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


def test_parts_and_placeholders_are_the_same(template, tmp_path):
    """Paths, bytes, addresses with their data, arrays and pictures give one feature, however the chat names them."""
    image = picture(40, 40)
    (tmp_path / 'cat.png').write_bytes(png(image))
    address = 'data:image/png;base64,' + base64.b64encode(png(image)).decode()
    expected = template.encode(chat('Look: <image> So?', images=[image]))
    parts = [
        {'type': 'image', 'image': image},
        {'type': 'image', 'path': str(tmp_path / 'cat.png')},
        {'type': 'image', 'url': (tmp_path / 'cat.png').as_uri()},
        {'type': 'image', 'bytes': png(image)},
        {'type': 'image', 'image': np.asarray(image)},
        {'type': 'image', 'image': {'bytes': png(image), 'path': None}},
        {'type': 'image_url', 'image_url': {'url': address}},
        {'type': 'image', 'base64': address.partition(',')[2]},
        {'type': 'image', 'image': {'base64': address}},
    ]
    for part in parts:
        content = [{'type': 'text', 'text': 'Look: '}, part, {'type': 'text', 'text': ' So?'}]
        feature = template.encode(chat(content))
        for name in ('input_ids', 'labels', 'position_ids', 'pixel_values', 'image_grid_thw'):
            np.testing.assert_array_equal(feature[name], expected[name])


def test_media_come_in_the_order_in_which_they_are_shown(template):
    """Parts with an image of their own stand among placeholders that take the trajectory's."""
    first, second, third = (picture(32, 32, seed=seed) for seed in range(3))
    content = [
        {'type': 'text', 'text': 'a <image>'},
        {'type': 'image', 'image': second},
        {'type': 'image'},
    ]
    mixed = template.encode(chat(content, images=[first, third]))
    plain = template.encode(chat('a <image><image><image>', images=[first, second, third]))
    np.testing.assert_array_equal(mixed['pixel_values'], plain['pixel_values'])
    again = template.format_trajectory(template.format_trajectory(chat(content, images=[first, third])))
    assert again['images'] == [first, second, third]


def test_positions_equal_transformers(template, folder):
    """Images and videos are placed in time, height and width as the model itself places them."""
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


def test_a_video_of_one_picture_is_that_picture(template):
    """A still video has the patches of its image; frames that differ each fill their own slot of a step."""
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
def test_positions_are_of_what_fits_together(template, name, value):
    """What is missing, of another shape, or of a time that no position counts, is refused by its field."""
    feature = template.encode(chat('<video>', videos=[[picture(32, 32)]]))
    assert template.set_mm_position_ids(feature)['position_ids'].shape == (3, feature['length'])
    with pytest.raises(InvalidFeature) as refused:
        template.set_mm_position_ids({**feature, name: value})
    assert refused.value.field == name


def test_sampled_tokens_go_on_behind_the_furthest_position(template):
    """A completion keeps the prompt's pixels, and its positions go on on every axis."""
    asked = {'messages': [{'role': 'user', 'content': '<image>?'}], 'images': [picture(96, 32)]}
    prompt = template.encode(asked, add_generation_prompt=True)
    joined = template.concat_input_feature(prompt, [40, 41])
    whole = template.set_mm_position_ids({**joined, 'position_ids': None})
    np.testing.assert_array_equal(joined['position_ids'], whole['position_ids'])
    assert joined['pixel_values'] is prompt['pixel_values']
    with pytest.raises(InvalidFeature):
        template.concat_input_feature({**prompt, 'position_ids': np.zeros((3, 2), np.int32)}, [40])


MOVING = encoded(picture(32, 32), 'GIF', save_all=True, append_images=[picture(32, 32, seed=1)])
BOMB = b'BM' + bytes(12) + (40).to_bytes(4, 'little') + (60000).to_bytes(4, 'little') * 2 + b'\1\0\x18\0' + bytes(24)
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
    (chat('<image>', images=[MOVING]), 'images[0]'),
    (chat('<image>', images=[Image.open(io.BytesIO(MOVING))]), 'images[0]'),
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


@pytest.mark.parametrize(('given', 'field'), REFUSED)
def test_what_cannot_be_read_is_refused_by_its_field(template, given, field):
    """Too few, too many, broken, hostile, remote or unknown media are named where they were given."""
    with pytest.raises(InvalidTrajectory) as refused:
        template.encode(given)
    assert refused.value.field == field


@pytest.mark.parametrize('kind', ['PNG', 'JPEG', 'WEBP', 'GIF', 'BMP'])
def test_broken_files_are_refused_or_read(kind):
    """Files cut off anywhere, or with bytes changed, end in an image or in the refusal of their field."""
    draw, exif = random.Random(0), Image.Exif()
    exif[274], exif[270] = 6, 'turned'
    moving = {'save_all': True, 'append_images': [picture(33, 17, seed=1)]} if kind in ('GIF', 'WEBP', 'PNG') else {}
    whole = [encoded(picture(33, 17), kind, **({'exif': exif} if kind in ('JPEG', 'WEBP', 'PNG') else {}))]
    whole += [encoded(picture(33, 17), kind, **moving)]
    outcomes = set()
    for _ in range(400):
        content = bytearray(draw.choice(whole))
        for _ in range(draw.randrange(1, 6)):
            content[draw.randrange(len(content))] = draw.choice((0, 255, draw.randrange(256)))
        content = content[: draw.choice((len(content), draw.randrange(len(content))))]
        try:
            outcomes.add(MediaLoader().image(bytes(content), 'images[0]').mode)
        except InvalidTrajectory as refused:
            outcomes.add(refused.field)
    assert outcomes == {'RGB', 'images[0]'}


@pytest.mark.parametrize('limits', [MediaLimits(max_pixels=1000), MediaLimits(max_bytes=100), MediaLimits(max_side=20)])
def test_limits_are_kept_before_anything_is_decoded(limits):
    """Pixels, bytes and sides have limits of their own, and a file may be refused for being one."""
    with pytest.raises(InvalidTrajectory):
        MediaLoader(limits=limits).image(png(picture(40, 40)), 'images[0]')


def test_videos_have_limits(template):
    """Frames, and the pixels of all of them, are counted before they are decoded."""
    frames = [picture(40, 40)] * 3
    for limits in (MediaLimits(max_frames=2), MediaLimits(max_video_pixels=4000)):
        with pytest.raises(InvalidTrajectory):
            MediaLoader(limits=limits).video(frames, 'videos[0]')


def test_files_are_not_read_where_they_may_not_be(tmp_path):
    """A service that serves strangers opens no path that they name."""
    path = tmp_path / 'cat.png'
    path.write_bytes(png(picture(8, 8)))
    assert MediaLoader().image(str(path), 'images[0]').size == (8, 8)
    for name in (str(path), path.as_uri()):
        with pytest.raises(InvalidTrajectory):
            MediaLoader(is_path_allowed=False).image(name, 'images[0]')


def test_an_image_is_never_cut(folder):
    """Whatever shortens texts refuses chats with images that are too long, or leaves them out."""
    long = chat('<image>', images=[picture(96, 96)])
    for strategy in ('raise', 'left', 'right', 'split'):
        with pytest.raises(ExampleTooLong):
            Template(str(folder), max_length=20, truncation_strategy=strategy).encode(long)
    assert Template(str(folder), max_length=20, truncation_strategy='delete').batch_encode([long]) == []


def test_templates_that_read_no_images_refuse_them(folder, tiny_llama_dir, template):
    """A text model's template, or one told to, knows no images; in texts `<image>` means nothing there."""
    deaf = [Template(str(tiny_llama_dir)), Template(str(folder), is_media_read=False)]
    assert [one.is_mm for one in (*deaf, template, Qwen3_5Template(str(folder)))] == [False, False, True, True]
    for one in deaf:
        assert one.encode(chat('what does <image> mean?'))['length']
        with pytest.raises(InvalidTrajectory) as refused:
            one.encode(chat('<image>', images=[picture(8, 8)]))
        assert refused.value.field == 'images'
        with pytest.raises(InvalidFeature):
            one.set_mm_position_ids({'input_ids': [1, 2]})


def test_what_the_model_sees_can_be_changed(folder):
    """A template of one's own may change every image on its way in."""

    class Inverted(Template):
        """Shows negatives."""

        def preprocess_image(self, image, place='images[0]'):
            """Return the negative."""
            return Image.fromarray(255 - np.asarray(super().preprocess_image(image, place)))

    noise = pixels(32, 32)
    shown = Inverted(str(folder)).encode(chat('<image>', images=[noise]))
    plain = Template(str(folder)).encode(chat('<image>', images=[255 - noise]))
    np.testing.assert_array_equal(shown['pixel_values'], plain['pixel_values'])
