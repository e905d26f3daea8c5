"""Why a dataset cannot be made, changed or read."""


class DatasetError(ValueError):
    """A dataset asked for something it cannot do; the sentence says what to do instead."""


class NotReady(DatasetError):
    """An earlier step is missing, such as a template before `encode`, or was done too early."""

    def __init__(self, problem: str, *, needs: str = '') -> None:
        super().__init__(problem)
        self.needs = needs
        """The step that is missing, such as 'set_template'; empty where another one came too early."""

    def __reduce__(self) -> tuple[object, ...]:
        return _not_ready, (str(self), self.needs)


class UnreadableFile(DatasetError):
    """A file that does not hold rows of the format it claims."""


class InvalidExample(DatasetError):
    """A row that cannot be turned into tokens."""

    def __init__(self, row_index: int, field: str, problem: str) -> None:
        place = f'rows[{row_index}].{field}' if field else f'rows[{row_index}]'
        super().__init__(f'{place} {problem}')
        self.row_index = row_index
        """Zero-based."""
        self.field = field
        """Path within the row, such as `messages[1].role`; empty for the whole row."""
        self.problem = problem
        """What is wrong with it and what would be right."""

    def __reduce__(self) -> tuple[type, tuple[int, str, str]]:
        return type(self), (self.row_index, self.field, self.problem)


def _not_ready(problem: str, needs: str) -> NotReady:
    return NotReady(problem, needs=needs)
