"""The hubs' verbs under the names that programs know: up in the foreground or background, and down."""

import importlib
import os
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar

from twinkle.hub.errors import DatasetNotFound, HubError, HubUnreachable
from twinkle.hub.ids import HubId, Source, local_path, without_alias
from twinkle.hub.resolve import resolve_dataset, resolve_files, resolve_model
from twinkle.hub.upload import Uploaded, upload, upload_later


class HubOperation:
    """Whatever hub an id names: `hf://org/name` or `ms://org/name`.

    Concurrency: the pushes in the background are those of the whole process; any thread may wait for them.
    """

    source: ClassVar[Source | None] = None
    """The hub of ids without a prefix. None: they are looked for in every place, and cannot be pushed to."""
    _pushes: ClassVar[list[Future[Uploaded]]] = []

    @classmethod
    def push_to_hub(
        cls,
        repo_id: str,
        folder_path: str | os.PathLike[str],
        *,
        token: str,
        private: bool = True,
        ignore_patterns: Sequence[str] = (),
    ) -> Uploaded:
        """Put the files of a folder into a model repository as one commit; as `twinkle.hub.upload`, errors too.

        Args:
            repo_id: where to.
            folder_path: what; only read.
            token: of someone who may write there.
            private: whether a repository that is made can be seen by its owner only.
            ignore_patterns: of files to leave out.
        """
        return upload(folder_path, cls._of_hub(repo_id), token=token, is_private=private, ignore=tuple(ignore_patterns))

    @classmethod
    def async_push_to_hub(
        cls,
        repo_id: str,
        folder_path: str | os.PathLike[str],
        *,
        token: str,
        private: bool = True,
        ignore_patterns: Sequence[str] = (),
    ) -> Future[Uploaded]:
        """Begin `push_to_hub` in the background; `wait_for` waits, and a program that ends does too.

        What can be told without the hub is refused at once.
        """
        push = upload_later(
            folder_path, cls._of_hub(repo_id), token=token, is_private=private, ignore=tuple(ignore_patterns)
        )
        HubOperation._pushes.append(push)
        return push

    @classmethod
    def wait_for(cls, timeout: float | None = None) -> list[Uploaded]:
        """Wait until every push that was begun is done, and return where they went, in the order of their beginning.

        Args:
            timeout: seconds for each of them. Unset: as long as it takes.

        Raises:
            HubError: one failed; the first in order. All are forgotten then.
            TimeoutError: one is not done in time; the next call waits for all of them again.
        """
        pushes = list(HubOperation._pushes)
        for push in pushes:
            if wait((push,), timeout).not_done:
                raise TimeoutError(f'a push is not done after {timeout} seconds')
        for push in pushes:
            with suppress(ValueError):  # another thread waited for it too
                HubOperation._pushes.remove(push)
        return [push.result() for push in pushes]

    @classmethod
    def download_model(cls, model_id: str) -> str:
        """Return the local folder of a model with its weights; as `twinkle.hub.resolve_model`, errors too."""
        return str(resolve_model(cls._id(model_id)))

    @classmethod
    def download_file(cls, repo_id: str, allow_patterns: str | Sequence[str]) -> str:
        """Return a local folder with the files of a model's repository that match.

        Raises:
            ModelNotFound: there is no such repository.
            HubUnreachable: the hub did not answer, or its client is not installed.
            HubError: no file of it matches.
        """
        patterns = (allow_patterns,) if isinstance(allow_patterns, str) else tuple(allow_patterns)
        folder = resolve_files(cls._id(repo_id), patterns)
        if not any(_matches(path.relative_to(folder), patterns) for path in folder.rglob('*') if path.is_file()):
            raise HubError(f'{repo_id} has no file that is one of {", ".join(patterns)}')
        return str(folder)

    @classmethod
    def load_dataset(
        cls, dataset_id: str, *, subset_name: str = 'default', split: str = 'train', streaming: bool = False
    ) -> Any:
        """Return a dataset of the `datasets` library from a hub's repository or a folder; no code of it is run.

        `twinkle.dataset.Dataset` reads the same without that library.

        Raises:
            DatasetNotFound: no place has it, or it has no such subset or split.
            HubUnreachable: only the network could have it and it did not answer, or `datasets` is not installed.
        """
        folder = resolve_dataset(cls._id(dataset_id))
        try:
            library = importlib.import_module('datasets')
        except ImportError as error:
            raise HubUnreachable('reading rows with datasets needs it: pip install datasets') from error
        subset = None if subset_name == 'default' else subset_name
        try:
            return library.load_dataset(str(folder), subset, split=split, streaming=streaming)
        except (ValueError, OSError) as error:
            raise DatasetNotFound(f'{dataset_id} has no rows of subset {subset_name!r}, split {split!r}') from error

    @classmethod
    def _id(cls, text: str) -> str:
        """Return an id with the prefix of this hub; paths and aliases stay what they are.

        Raises:
            HubError: the id names another hub.
        """
        is_elsewhere = local_path(text) is not None or without_alias(text) != text
        return text if is_elsewhere else cls._of_hub(text)

    @classmethod
    def _of_hub(cls, text: str) -> str:
        """Return a repository's id with the prefix of this hub.

        Raises:
            HubError: the id names another hub.
        """
        if cls.source is None:
            return text
        hub_id = HubId.parse(text)
        if hub_id.source not in (None, cls.source):
            raise HubError(f'{text!r} is not of the hub {cls.source}://; use HubOperation, which takes both')
        return str(HubId(cls.source, hub_id.name))


class HFHub(HubOperation):
    """Hugging Face: ids may leave out `hf://`."""

    source: ClassVar[Source | None] = 'hf'


class MSHub(HubOperation):
    """ModelScope: ids may leave out `ms://`."""

    source: ClassVar[Source | None] = 'ms'


def _matches(path: Path, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(path.as_posix(), pattern) for pattern in patterns)
