"""A custom template: `python -m examples.own_components.template`."""

from collections.abc import Mapping
from typing import Any

from examples.own_components.tiny import CHATS, tiny_tokenizer
from twinkle.data_format import Trajectory
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.template import Template


class NumberedTemplate(Template):
    """Numbers the messages of the user, so that the model can refer to them."""

    def format_trajectory(self, trajectory: Mapping[str, Any]) -> Trajectory:
        """Return the chat that the model receives. The library computes the labels from the result."""
        chat, number = super().format_trajectory(trajectory), 0
        for message in chat['messages']:
            if message['role'] == 'user':
                number += 1
                message['content'] = f'[{number}] {message["content"]}'
        return chat


def main() -> None:
    """Encode a dataset with the template given as a class with options, and as an instance."""
    with tiny_tokenizer() as folder:
        for kind, template, options in (
            ('class', NumberedTemplate, {'model_id': folder, 'max_length': 128}),
            ('object', NumberedTemplate(folder), {}),
        ):
            dataset = Dataset(DatasetMeta(data=[{'messages': CHATS[0] + CHATS[1]}]))
            dataset.set_template(template, **options)
            dataset.encode()
            ids, labels = dataset[0]['input_ids'], dataset[0]['labels']
            labelled = dataset.template.decode([int(label) for label in labels if label != -100])
            print(f'{kind}: {dataset.template.decode(ids)!r}, labels {labelled!r}')


if __name__ == '__main__':
    main()
