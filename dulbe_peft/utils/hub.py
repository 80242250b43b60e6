"""Repositories on the Hub: download named files of one commit, and upload a folder as one commit."""

import glob
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import constants

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo

WITHOUT_NETWORK = (
    'the page "What goes wrong" (docs/troubleshooting.md) says how to bring a model to a machine without a network'
)


@contextmanager
def reached() -> Iterator[None]:
    """Turn connection errors of the Hub's client into a `ConnectionError`, whichever HTTP library raises them."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) or not type(error).__module__.startswith("httpx"):
            raise
        raise ConnectionError(f"the Hub cannot be reached: {error}") from error


def fetch(
    source: str | Path,
    files: Sequence[str],
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | Path | None = None,
) -> tuple[Path, str]:
    """Download files of a repository, and return their folder and the commit.

    Raises:
        FileNotFoundError: If the repository, the revision or a file does not exist.
    """
    if isinstance(source, Path):
        raise FileNotFoundError(f"folder {str(source)!r} does not exist")
    where = f"{source!r}" if revision is None else f"{source!r} at revision {revision!r}"
    cached = Path(cache_dir or constants.HF_HUB_CACHE, f"models--{source.replace('/', '--')}")
    if constants.HF_HUB_OFFLINE and not cached.is_dir():  # checked here, because importing the client takes time
        raise FileNotFoundError(
            f"{source!r} is not a folder, and {where} is not in the Hub cache (offline mode); {WITHOUT_NETWORK}"
        )
    from huggingface_hub import errors, snapshot_download
    from huggingface_hub.utils import HFValidationError

    try:
        wanted = [glob.escape(name) for name in files]
        got = snapshot_download(source, revision=revision, token=token, cache_dir=cache_dir, allow_patterns=wanted)
        folder = Path(got)
    except HFValidationError as error:
        raise FileNotFoundError(f"{source!r} is neither an existing folder nor a repository id on the Hub") from error
    except errors.LocalEntryNotFoundError as error:
        problem = f"{source!r} is not a folder, the Hub cannot be reached, and {where} is not in its cache"
        raise FileNotFoundError(f"{problem}; {WITHOUT_NETWORK}") from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.EntryNotFoundError) as error:
        raise FileNotFoundError(f"{source!r} is not a folder, and {where} is not on the Hub: {error}") from error
    absent = [name for name in files if not (folder / name).is_file()]
    if absent:
        raise FileNotFoundError(f"{source!r} is not a folder, and {where} on the Hub has no file {absent[0]!r}")
    return folder, folder.name  # the cache's layout: snapshots/<commit>


def push(
    write: Callable[[Path, str], None],
    repo_id: str,
    *,
    commit_message: str,
    commit_description: str | None = None,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    replaces: Iterable[str] = (),
) -> "CommitInfo":
    """Upload the files that `write(folder, "owner/name")` creates as one commit.

    Remote files that match a pattern in `replaces` and are not among the new files are deleted.
    """
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "upload"
        write(folder, repo_id)
        if revision is not None and not create_pr:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        return api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            revision=revision,
            commit_message=commit_message,
            commit_description=commit_description,
            create_pr=create_pr,
            delete_patterns=list(replaces) or None,
        )


def is_repo_id(name: str | None) -> bool:
    """Return whether `name` is a valid repository id and not an existing local path."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    with suppress(HFValidationError):
        validate_repo_id(name or "")
        return bool(name) and not Path(str(name)).exists()
    return False
