"""A custom preprocessor: `python -m examples.own_components.preprocessor`."""

from typing import Any

from twinkle.dataset import Dataset, DatasetMeta
from twinkle.preprocessor import RowPreprocessor

ROWS = [{'word': 'cat', 'french': 'chat'}, {'word': 'dog', 'french': 'chien'}]


class VocabularyProcessor(RowPreprocessor):
    """Converts a word and its translation to a chat."""

    def __init__(self, language: str) -> None:
        self.language = language

    def convert(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return the new row. All other columns are dropped."""
        question = {'role': 'user', 'content': f'Translate "{row["word"]}" into {self.language}.'}
        return {'messages': [question, {'role': 'assistant', 'content': row[self.language.lower()]}]}


def main() -> None:
    """Map a dataset with the preprocessor given as a class with arguments, as an instance, and as a function."""
    for kind, preprocessor, arguments in (
        ('class', VocabularyProcessor, {'language': 'French'}),
        ('object', VocabularyProcessor('French'), None),
        ('function', VocabularyProcessor('French').__call__, None),
    ):
        dataset = Dataset(DatasetMeta(data=ROWS))
        dataset.map(preprocessor, init_args=arguments)
        print(f'{kind}: {[message["content"] for message in dataset[0]["messages"]]}')


if __name__ == '__main__':
    main()
