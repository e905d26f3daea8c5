"""Upload to and download from hubs, with the method names that existing programs use."""

import importlib
import os
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar

from twinkle.blocking import wait_for_all
from twinkle.hub.errors import DatasetNotFound, HubError, HubUnreachable
from twinkle.hub.ids import HubId, Source, local_path, without_alias
from twinkle.hub.resolve import resolve_dataset, resolve_files, resolve_model
from twinkle.hub.upload import Uploaded, upload, upload_later


class HubOperation:
    """Operations on the hub that an id selects: `hf://org/name` or `ms://org/name`.

    Concurrency: background pushes are shared by the whole process; any thread may wait for them.
    """

    source: ClassVar[Source | None] = None
    """Hub of ids without a prefix. None: bare ids are searched in all locations and cannot be pushed to."""
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
        """Upload the files of a folder to a model repository as one commit; see `twinkle.hub.upload`.

        Args:
            repo_id: the repository.
            folder_path: the folder to upload; it is not changed.
            token: access token with write permission.
            private: whether a repository that is created is private. Default: True.
            ignore_patterns: patterns of file names to leave out. Default: none.

        Raises:
            HubError: as in `twinkle.hub.upload`, or the id belongs to a different hub.
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
        """Start `push_to_hub` in the background; `wait_for` and the exit of the program wait for the upload.

        The arguments are the same as for `push_to_hub`, and are checked immediately.

        Raises:
            HubError: an argument is invalid. Errors of the hub are raised by the future.
        """
        push = upload_later(
            folder_path, cls._of_hub(repo_id), token=token, is_private=private, ignore=tuple(ignore_patterns)
        )
        HubOperation._pushes.append(push)
        return push

    @classmethod
    def wait_for(cls, timeout: float | None = None) -> list[Uploaded]:
        """Wait for all background pushes and return their results, in the order in which they were started.

        Args:
            timeout: seconds to wait for each push. Default: None, no limit.

        Raises:
            HubError: a push failed; the first error by start order is raised. All pushes are then removed.
            TimeoutError: a push is not done in time; the next call waits for all pushes again.
        """
        pushes = list(HubOperation._pushes)
        for push in pushes:
            if not wait_for_all([push], timeout):
                raise TimeoutError(f'a push did not finish within {timeout} seconds; call wait_for again')
        for push in pushes:
            with suppress(ValueError):  # another thread removed it
                HubOperation._pushes.remove(push)
        return [push.result() for push in pushes]

    @classmethod
    def download_model(cls, model_id: str) -> str:
        """Return the local folder of a model with its weights; see `twinkle.hub.resolve_model` for the errors."""
        return str(resolve_model(cls._id(model_id)))

    @classmethod
    def download_file(cls, repo_id: str, allow_patterns: str | Sequence[str]) -> str:
        """Return a local folder with the matching files of a model repository.

        Args:
            repo_id: the repository, an alias or a folder.
            allow_patterns: one or several patterns of file names.

        Raises:
            ModelNotFound: the repository does not exist.
            HubUnreachable: the hub did not respond, or its client is not installed.
            HubError: no file matches, or the id is malformed or belongs to a different hub.
        """
        patterns = (allow_patterns,) if isinstance(allow_patterns, str) else tuple(allow_patterns)
        folder = resolve_files(cls._id(repo_id), patterns)
        if not any(_matches(path.relative_to(folder), patterns) for path in folder.rglob('*') if path.is_file()):
            raise HubError(f'{repo_id} has no file that matches {", ".join(patterns)}')
        return str(folder)

    @classmethod
    def load_dataset(
        cls, dataset_id: str, *, subset_name: str = 'default', split: str = 'train', streaming: bool = False
    ) -> Any:
        """Load a repository or folder with the Hugging Face library `datasets`; code in the repository is not run.

        Args:
            dataset_id: the repository or a folder.
            subset_name: name of the subset. Default: 'default'.
            split: name of the split. Default: 'train'.
            streaming: whether to return a `datasets.IterableDataset`. Default: False.

        Raises:
            DatasetNotFound: the dataset, the subset or the split does not exist.
            HubUnreachable: the dataset is not available locally and the hub did not respond, or `datasets` is not
                installed.
            HubError: the id is malformed or belongs to a different hub.
        """
        folder = resolve_dataset(cls._id(dataset_id))
        try:
            library = importlib.import_module('datasets')
        except ImportError as error:
            raise HubUnreachable('the library datasets is not installed (pip install datasets)') from error
        subset = None if subset_name == 'default' else subset_name
        try:
            return library.load_dataset(str(folder), subset, split=split, streaming=streaming)
        except (ValueError, OSError) as error:
            raise DatasetNotFound(f'{dataset_id} has no rows of subset {subset_name!r}, split {split!r}') from error

    @classmethod
    def _id(cls, text: str) -> str:
        """Return an id with the prefix of this hub; paths and aliases are returned unchanged.

        Raises:
            HubError: the id is malformed or belongs to another hub.
        """
        is_path_or_alias = local_path(text) is not None or without_alias(text) != text
        return text if is_path_or_alias else cls._of_hub(text)

    @classmethod
    def _of_hub(cls, text: str) -> str:
        """Return a repository id with the prefix of this hub.

        Raises:
            HubError: the id is malformed or belongs to another hub.
        """
        if cls.source is None:
            return text
        hub_id = HubId.parse(text)
        if hub_id.source not in (None, cls.source):
            raise HubError(f'{text!r} does not belong to the hub {cls.source}://; HubOperation accepts all hubs')
        return str(HubId(cls.source, hub_id.name))


class HFHub(HubOperation):
    """Operations on Hugging Face; the prefix `hf://` of ids is optional."""

    source: ClassVar[Source | None] = 'hf'


class MSHub(HubOperation):
    """Operations on ModelScope; the prefix `ms://` of ids is optional."""

    source: ClassVar[Source | None] = 'ms'


def _matches(path: Path, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(path.as_posix(), pattern) for pattern in patterns)
