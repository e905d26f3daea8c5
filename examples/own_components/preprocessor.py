"""A preprocessor of one's own: `python -m examples.own_components.preprocessor`."""

from typing import Any

from twinkle.dataset import Dataset, DatasetMeta
from twinkle.preprocessor import RowPreprocessor

ROWS = [{'word': 'cat', 'french': 'chat'}, {'word': 'dog', 'french': 'chien'}]


class VocabularyProcessor(RowPreprocessor):
    """Makes a chat of a word and its translation."""

    def __init__(self, language: str) -> None:
        self.language = language

    def convert(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return the new row; what it leaves out is gone."""
        question = {'role': 'user', 'content': f'What is "{row["word"]}" in {self.language}?'}
        return {'messages': [question, {'role': 'assistant', 'content': row[self.language.lower()]}]}


def main() -> None:
    """Map a dataset by the class with its arguments, by an object, and by a plain function of columns."""
    for way, given, arguments in (
        ('class', VocabularyProcessor, {'language': 'French'}),
        ('object', VocabularyProcessor('French'), None),
        ('function', VocabularyProcessor('French').__call__, None),
    ):
        dataset = Dataset(DatasetMeta(data=ROWS))
        dataset.map(given, init_args=arguments)
        print(f'{way}: {[message["content"] for message in dataset[0]["messages"]]}')


if __name__ == '__main__':
    main()
