"""A classifier as two files, here or on the Hub: `<stem>_config.json` and `<stem>.safetensors`.

Read strictly: the configuration's fields, then the shapes in the tensor file's header, then the tensors. No memory is
taken for a tensor that does not fit the configuration.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from dulbe_peft.classifiers.calibration import read_temperatures, write_temperatures
from dulbe_peft.classifiers.state import EXTRA_STATE, GrowingState, encode_extra_state
from dulbe_peft.data.names import check_class_names
from dulbe_peft.utils import hub
from dulbe_peft.utils.files import read_json, write_json
from dulbe_peft.utils.specs import setting_names
from dulbe_peft.utils.tensors import read_tensors, tensor_shapes, write_tensors

COMMON_FIELDS = ("format", "embed_dim", "logit_scale", "class_names")
OPTIONAL_FIELDS = ("calibration", "source")


class SavedState(GrowingState):
    """A growing state that can be written to files and read from them.

    Attributes:
        name: key of the classifier in the registry.
        file_stem: how the names of its files begin; the name where a class does not set it.
        file_format: version of its files, in their `format` field.
        source: `repo_id` and `commit` on the Hub that it was loaded from, or None; kept when it is saved.
    """

    name: ClassVar[str] = ""
    file_stem: ClassVar[str] = ""
    file_format: ClassVar[str] = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" in vars(cls):
            cls.file_stem = vars(cls).get("file_stem", cls.name)
            cls.file_format = vars(cls).get("file_format", f"dulbe-{cls.name}-classifier-1")

    def __init__(self, embed_dim: int, logit_scale: float) -> None:
        super().__init__()
        self.embed_dim = embed_dim
        self.logit_scale = logit_scale
        self.source: dict[str, str] | None = None

    @classmethod
    def setting_names(cls) -> list[str]:
        """Names of the constructor's own parameters, those beside `embed_dim` and `logit_scale`."""
        return [name for name in setting_names(cls) if name not in ("embed_dim", "logit_scale")]

    def settings(self) -> dict[str, Any]:
        """The constructor's own arguments as plain values; an attribute of the same name holds each of them."""
        return {name: getattr(self, name) for name in self.setting_names()}

    @classmethod
    def file_names(cls) -> tuple[str, str]:
        """Names of the configuration and of the tensors."""
        return f"{cls.file_stem}_config.json", f"{cls.file_stem}.safetensors"

    @classmethod
    def saved_settings(cls) -> list[str]:
        """The settings that the configuration holds."""
        return cls.setting_names()

    @classmethod
    def constructor_arguments(cls, config: dict[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        """What to call the constructor with, from the configuration and the shapes in the tensors' header."""
        return config

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `<stem>_config.json` and `<stem>.safetensors`, names that do not collide with an adapter's files."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config_file, tensors_file = self.file_names()
        settings = self.settings()
        config: dict[str, Any] = {"format": self.file_format, "embed_dim": self.embed_dim}
        config |= {name: settings[name] for name in self.saved_settings()}
        config |= {"logit_scale": self.logit_scale, "class_names": self._class_names}
        if self._calibration:
            config["calibration"] = write_temperatures(self._calibration)
        if self.source:
            config["source"] = self.source
        write_tensors(folder / tensors_file, self.tensors(), {"format": self.file_format})
        write_json(folder / config_file, config)

    @classmethod
    def from_pretrained(
        cls, source: str | Path, *, revision: str | None = None, token: str | None = None, cache_dir: str | None = None
    ) -> Self:
        """Load what `save_pretrained` wrote, onto the CPU.

        Args:
            source: a folder, or the id of a repository on the Hub.
            revision: branch, tag or commit on the Hub; the commit that it stands for is kept in `source`.
            token: of the Hub.
            cache_dir: where downloads are kept.

        Raises:
            FileNotFoundError: there is no such folder, repository or revision, or a file is missing from it.
            ValueError: a file is damaged, of another format, or the two do not fit each other.
        """
        folder, commit = Path(source), None
        config_file, tensors_file = cls.file_names()
        if not folder.is_dir():
            folder, commit = hub.fetch(source, (config_file, tensors_file), revision, token, cache_dir)
        config = cls._read_config(folder / config_file)
        names, saved_source = config.pop("class_names"), config.pop("source", None)
        temperatures = config.pop("calibration", None)
        shapes = tensor_shapes(folder / tensors_file)
        try:
            if not isinstance(names, list):
                raise TypeError(f"class_names must be a list, got {names!r:.100}")
            check_class_names(names or ["none yet"])
            arguments = cls.constructor_arguments(config, shapes)
            with torch.device("meta"):
                stand_in = cls(**arguments)
            later = set(stand_in.added_since(0))
            older = later if not later & set(shapes) else set()
            for problem, keys in (
                ("Missing", set(stand_in.tensors()) - set(shapes) - older),
                ("Unexpected", set(shapes) - set(stand_in.tensors())),
            ):
                if keys:
                    raise ValueError(f"{problem} key(s) in {tensors_file}: {', '.join(sorted(keys)):.200}")
            stand_in.check_shapes(shapes, len(names))
            classifier = cls(**arguments)
            tensors, _ = read_tensors(folder / tensors_file)
            extra = encode_extra_state(names, read_temperatures(temperatures))
            classifier.load_state_dict({**tensors, EXTRA_STATE: extra})
        except (ValueError, TypeError, RuntimeError, MemoryError) as error:
            raise ValueError(f"{cls.__name__} in {str(source)!r} cannot be loaded: {error}") from error
        classifier.source = {"repo_id": str(source), "commit": commit} if commit else saved_source
        return classifier.eval()

    @classmethod
    def _read_config(cls, path: Path) -> dict[str, Any]:
        try:
            config = read_json(path)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{path} does not exist: {path.parent} holds no saved {cls.__name__}") from error
        if not isinstance(config, dict) or config.get("format") != cls.file_format:
            found = config.get("format") if isinstance(config, dict) else config
            raise ValueError(f"{path} has format {found!r}, expected {cls.file_format!r}")
        expected = {*COMMON_FIELDS, *cls.saved_settings()}
        if set(config) - set(OPTIONAL_FIELDS) != expected:
            raise ValueError(f"{path} has the fields {sorted(config)}, expected {sorted(expected)}")
        del config["format"]
        return config

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | None = None,
        revision: str | None = None,
        commit_message: str | None = None,
        create_pr: bool = False,
    ) -> Any:
        """Upload what `save_pretrained` writes to a repository on the Hub, which is made where it does not exist.

        Returns:
            huggingface_hub's CommitInfo.
        """
        repo_id = hub.create(repo_id, private, token)
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            return hub.upload(
                Path(folder),
                repo_id,
                commit_message=commit_message or f"Upload {self.name} classifier",
                token=token,
                revision=revision,
                create_pr=create_pr,
            )
