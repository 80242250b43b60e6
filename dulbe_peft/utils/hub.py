"""Repositories on the Hub: named files of one commit, and folders uploaded as one commit.

Only files that were asked for by name are downloaded, and none that is a pickle.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import HfApi, constants, file_exists, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import HFValidationError, validate_repo_id


def fetch(
    source: str | Path,
    files: Iterable[str],
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | Path | None = None,
) -> tuple[Path, str]:
    """Download files of a repository, all of the commit that the first one came from.

    Args:
        source: id of a repository on the Hub; a Path can only have been meant as a folder, and is refused.
        files: their paths in the repository, at least one.
        revision: branch, tag or commit; None: the main branch.
        token: of the Hub; None takes the one that is stored on the machine.
        cache_dir: where downloads are kept; None: the Hub client's cache.

    Returns:
        The local folder that holds them, and the hash of the commit.

    Raises:
        FileNotFoundError: `source` is no repository id, or there is no such repository, revision or file.
    """
    if isinstance(source, Path):
        raise FileNotFoundError(f"folder {str(source)!r} does not exist")
    folder = Path()
    for file in files:
        try:
            validate_repo_id(source)
            path = hf_hub_download(source, file, revision=revision, token=token, cache_dir=cache_dir)
        except HFValidationError as error:
            raise FileNotFoundError(
                f"{source!r} is neither an existing folder nor a repository id on the Hub"
            ) from error
        except (RepositoryNotFoundError, RevisionNotFoundError, EntryNotFoundError) as error:
            at = "" if revision is None else f" at revision {revision!r}"
            raise FileNotFoundError(
                f"{source!r} is no folder here, and the Hub gives no {file!r} of it{at}: {error}"
            ) from error
        # The cache's layout: snapshots/<commit>/<file>.
        folder = Path(path).parents[len(PurePosixPath(file).parts) - 1]
        revision = folder.name
    return folder, folder.name


def create(repo_id: str, private: bool | None = None, token: str | None = None) -> str:
    """Make a repository where it does not exist yet, and return its whole id, owner/name.

    Args:
        repo_id: name, or owner/name.
        private: visibility of a new repository; None: the owner's default.
        token: of the Hub; None takes the one that is stored on the machine.
    """
    return HfApi(token=token).create_repo(repo_id, private=private, exist_ok=True).repo_id


def upload(
    folder: Path,
    repo_id: str,
    *,
    commit_message: str,
    replaces: Sequence[str] = (),
    token: str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
) -> Any:
    """Upload a folder as one commit to a repository.

    Args:
        folder: its files go to the repository's root.
        repo_id: owner/name.
        commit_message: first line of the commit.
        replaces: files that are removed from the repository where the folder does not hold them.
        token: of the Hub; None takes the one that is stored on the machine.
        revision: branch, made where it does not exist; None: the main branch.
        create_pr: open a pull request instead of writing to the branch.

    Returns:
        huggingface_hub's CommitInfo.
    """
    api = HfApi(token=token)
    if revision is not None and not create_pr:
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    absent = [name for name in replaces if not (folder / name).exists()]
    stale = [name for name in absent if api.file_exists(repo_id, name, revision=revision)]
    return api.upload_folder(
        repo_id=repo_id,
        folder_path=folder,
        revision=revision,
        commit_message=commit_message,
        create_pr=create_pr,
        delete_patterns=stale or None,
    )


def has_file(
    source: str, file: str, revision: str | None = None, token: Any = None, cache_dir: str | Path | None = None
) -> bool:
    """Whether a folder, or a repository on the Hub (offline: its cached part), holds a file."""
    if Path(source).is_dir():
        return (Path(source) / file).exists()
    if constants.HF_HUB_OFFLINE:
        return isinstance(try_to_load_from_cache(source, file, cache_dir=cache_dir, revision=revision), str)
    return file_exists(source, file, revision=revision, token=token)
