"""What the processor refuses."""

from functools import partial


class InvalidFeatures(ValueError):
    """A batch cannot be trained on; nothing was changed."""

    def __init__(self, problem: str, *, index: int | None = None, field: str = '') -> None:
        place = 'features' if index is None else f'features[{index}]'
        super().__init__(f'{place}{"." if field else ""}{field} {problem}')
        self.problem = problem
        self.index = index
        """Which feature; None for the batch as a whole."""
        self.field = field
        """Which of its fields; empty for the feature as a whole."""

    def __reduce__(self) -> tuple[partial['InvalidFeatures'], tuple[str]]:
        return partial(type(self), index=self.index, field=self.field), (self.problem,)
