"""The error that components raise when an optional library is not installed."""


class MissingLibrary(ImportError):
    """An optional library is not installed. The message contains the `pip install` command.

    Args:
        library: name of the library.
        install: requirement to pass to pip, such as the extra `twinkle-grpc[rewards]`.
    """

    def __init__(self, library: str, install: str) -> None:
        super().__init__(f"{library} is not installed; run: pip install '{install}'", name=library)
        self.library, self.install = library, install

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.library, self.install)
