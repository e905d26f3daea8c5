"""A template of one's own: `python -m examples.own_components.template`."""

from collections.abc import Mapping
from typing import Any

from examples.own_components.tiny import CHATS, tiny_tokenizer
from twinkle.data_format import Trajectory
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.template import Template


class NumberedTemplate(Template):
    """Numbers the turns of the user, so that a model may refer to them."""

    def format_trajectory(self, trajectory: Mapping[str, Any]) -> Trajectory:
        """Return the chat as the model is to see it; labels follow by themselves."""
        chat, number = super().format_trajectory(trajectory), 0
        for message in chat['messages']:
            if message['role'] == 'user':
                number += 1
                message['content'] = f'[{number}] {message["content"]}'
        return chat


def main() -> None:
    """Encode a dataset by the class with its options, and by an object."""
    with tiny_tokenizer() as folder:
        for way, given, options in (
            ('class', NumberedTemplate, {'model_id': folder, 'max_length': 128}),
            ('object', NumberedTemplate(folder), {}),
        ):
            dataset = Dataset(DatasetMeta(data=[{'messages': CHATS[0] + CHATS[1]}]))
            dataset.set_template(given, **options)
            dataset.encode()
            ids, labels = dataset[0]['input_ids'], dataset[0]['labels']
            learned = dataset.template.decode([int(label) for label in labels if label != -100])
            print(f'{way}: {dataset.template.decode(ids)!r}, of which is learned {learned!r}')


if __name__ == '__main__':
    main()
