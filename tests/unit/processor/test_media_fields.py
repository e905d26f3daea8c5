"""Tests of packing features with images and videos."""

import numpy as np
import pytest

from twinkle.data_format import VisionSpec
from twinkle.processor import InputLimits, InputProcessor, InvalidFeatures

SPEC = VisionSpec(
    image_token_id=5, video_token_id=6, merge_size=2, patch_width=12, temporal_patch_size=1, tokens_per_second=2.0
)
LIMITS = InputLimits(vocab_size=50, max_tokens=32, media=SPEC)
TEXT = {'input_ids': [1, 2, 3], 'labels': [2, 3, -100]}


def image_feature(**changes):
    """Return a feature with two images, of one and of two tokens."""
    feature = {
        'input_ids': [1, 5, 2, 5, 5, 3],
        'labels': [-100, -100, -100, -100, 3, -100],
        'position_ids': [[0, 1, 2, 3, 3, 5], [0, 1, 2, 3, 3, 5], [0, 1, 2, 3, 4, 5]],
        'pixel_values': np.arange(12 * 12, dtype=np.float32).reshape(12, 12),
        'image_grid_thw': [[1, 2, 2], [1, 2, 4]],
    }
    return {name: value for name, value in {**feature, **changes}.items() if value is not None}


def pack(*features):
    """Pack features for a model that reads images."""
    return InputProcessor()(features, LIMITS)


def test_batch_has_the_rows_of_each_image():
    """Each image has its rows and patches, and text next to images has the same position on every axis."""
    batch = pack(TEXT, image_feature())
    assert [(one.begin_row, one.end_row, one.grid) for one in batch.media] == [(4, 5, (1, 2, 2)), (6, 8, (1, 2, 4))]
    assert [one.patches_PC[0, 0] for one in batch.media] == [0, 48]
    assert batch.position_ids_T[:, :3].tolist() == [[0, 1, 2]] * 3
    assert batch.position_ids_T[2, 3:].tolist() == [0, 1, 2, 3, 4, 5]
    assert batch.sequence_bounds == ((0, 3), (3, 9))
    assert pack(TEXT).position_ids_T.tolist() == [0, 1, 2]


def test_padding_beside_images_is_not_computed():
    """Masked tokens next to images are removed, and the images' rows are counted without them."""
    padded = image_feature()
    padded |= {name: [1, *padded[name]] for name in ('input_ids', 'labels')}
    padded['position_ids'] = [[0, *axis] for axis in padded['position_ids']]
    batch = pack({**padded, 'attention_mask': [0, 1, 1, 1, 1, 1, 1]})
    assert [one.begin_row for one in batch.media] == [1, 3]


def test_media_token_produced_by_the_model_is_text():
    """A media token that is a label is text; a media token elsewhere needs pixels, and is refused without them."""
    produced = {'input_ids': [1, 5, 2], 'labels': [5, 2, -100]}
    assert pack(produced).media == ()
    with pytest.raises(InvalidFeatures):
        pack({**produced, 'labels': [-100, 2, -100]})


def test_source_images_are_ignored():
    """Images of a dataset row are ignored if their pixels are given, and refused otherwise."""
    assert len(pack(image_feature(images=['cat.png', 'dog.png'], videos=[])).media) == 2
    with pytest.raises(InvalidFeatures):
        pack({**TEXT, 'images': ['cat.png']})


REFUSED = {
    'no pixels': (image_feature(pixel_values=None), 'pixel_values'),
    'no grid': (image_feature(image_grid_thw=None), 'input_ids'),
    'too few patches': (image_feature(pixel_values=np.zeros((8, 12))), 'pixel_values'),
    'narrow patches': (image_feature(pixel_values=np.zeros((12, 6))), 'pixel_values'),
    'words for pixels': (image_feature(pixel_values=[['a'] * 12] * 12), 'pixel_values'),
    'not finite': (image_feature(pixel_values=np.full((12, 12), np.nan)), 'pixel_values'),
    'odd grid': (image_feature(image_grid_thw=[[1, 3, 4]]), 'image_grid_thw'),
    'flat grid': (image_feature(image_grid_thw=[1, 2, 6]), 'image_grid_thw'),
    'huge grid': (image_feature(image_grid_thw=[[1, 2**40, 2]]), 'image_grid_thw'),
    'another image': (image_feature(image_grid_thw=[[1, 2, 2], [1, 4, 4]]), 'input_ids'),
    'torn image': (image_feature(image_grid_thw=[[1, 2, 4], [1, 2, 2]]), 'input_ids'),
    'video for image': (image_feature(video_grid_thw=[[1, 2, 2]]), 'input_ids'),
    'flat positions': (image_feature(position_ids=[0, 1, 2, 3, 4, 5]), 'position_ids'),
    'two axes': (image_feature(position_ids=[[0, 1, 2, 3, 4, 5]] * 2), 'position_ids'),
    'far positions': (image_feature(position_ids=[[0, 1, 2, 3, 4, 32]] * 3), 'position_ids'),
    'seconds of no video': (image_feature(second_per_grid_ts=[1.0]), 'second_per_grid_ts'),
    'words for seconds': (image_feature(second_per_grid_ts='soon'), 'second_per_grid_ts'),
    'images that are no list': (image_feature(images=5, pixel_values=None), ''),
    'no positions': (image_feature(position_ids=None), 'position_ids'),
}


@pytest.mark.parametrize('name', REFUSED)
def test_inconsistent_media_are_refused(name):
    """Inconsistent tokens, grids, patches and positions are refused with an error that names the field."""
    feature, field = REFUSED[name]
    with pytest.raises(InvalidFeatures) as refused:
        pack(TEXT, feature)
    assert (refused.value.index, refused.value.field) == (1, field)
