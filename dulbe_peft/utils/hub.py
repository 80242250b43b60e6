"""Repositories on the Hub: files of one commit, asked for by name, and folders uploaded as one commit."""

import glob
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from huggingface_hub import constants


@contextmanager
def reached() -> Iterator[None]:
    """Around calls of the Hub's client: no connection is a `ConnectionError`, whichever HTTP library it comes from."""
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
    """The folder of downloaded files of a repository, and the commit they are of; else a `FileNotFoundError`."""
    if isinstance(source, Path):
        raise FileNotFoundError(f"folder {str(source)!r} does not exist")
    where = f"{source!r}" if revision is None else f"{source!r} at revision {revision!r}"
    cached = Path(cache_dir or constants.HF_HUB_CACHE, f"models--{source.replace('/', '--')}")
    if constants.HF_HUB_OFFLINE and not cached.is_dir():  # said without the client, which takes time to import
        raise FileNotFoundError(f"{source!r} is no folder here, and offline the Hub has no {where}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError
    from huggingface_hub.utils import HFValidationError

    try:
        asked: dict[str, Any] = {"revision": revision, "token": token, "cache_dir": cache_dir}
        folder = Path(snapshot_download(source, **asked, allow_patterns=[glob.escape(name) for name in files]))
    except HFValidationError as error:
        raise FileNotFoundError(f"{source!r} is neither an existing folder nor a repository id on the Hub") from error
    except (RepositoryNotFoundError, RevisionNotFoundError, EntryNotFoundError) as error:
        raise FileNotFoundError(f"{source!r} is no folder here, and the Hub has no {where}: {error}") from error
    absent = [name for name in files if not (folder / name).is_file()]
    if absent:
        raise FileNotFoundError(f"{source!r} is no folder here, and on the Hub {where} holds no {absent[0]!r}")
    return folder, folder.name  # the cache's layout: snapshots/<commit>


def push(
    write: Callable[[Path, str], None],
    repo_id: str,
    *,
    commit_message: str,
    private: bool | None = None,
    token: str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    replaces: Iterable[str] = (),
) -> Any:
    """Upload what `write(folder, owner/name)` writes as one commit, without files that it `replaces` and lacks."""
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
            create_pr=create_pr,
            delete_patterns=list(replaces) or None,
        )


def is_repo_id(name: str | None) -> bool:
    """Whether `name` can be a repository on the Hub, and is no folder here."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    with suppress(HFValidationError):
        validate_repo_id(name or "")
        return bool(name) and not Path(str(name)).exists()
    return False
