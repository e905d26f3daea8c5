"""Libraries that a part of ours needs and that are not installed."""


class MissingLibrary(ImportError):
    """An optional library is not installed; the sentence says how to get it.

    Args:
        library: its name.
        install: what pip is to install; an extra of ours, such as `twinkle-grpc[rewards]`, where one brings it.
    """

    def __init__(self, library: str, install: str) -> None:
        super().__init__(f"{library} is not installed here: pip install '{install}'", name=library)
        self.library, self.install = library, install

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.library, self.install)
