"""Statistics of the inputs that each layer read in earlier tasks: S = sum of X'X over the layer's input tokens X.

Layers that read the same tensor (q, k and v of an attention block) share one matrix.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Self

import torch
from annotated_types import MinLen
from pydantic import ValidationError

from dulbe_peft.subspaces.decompositions import check_symmetric
from dulbe_peft.utils.processes import gather_objects, sum_over_processes
from dulbe_peft.utils.records import Record, first_problem
from dulbe_peft.utils.tensors import read_tensors, tensors_digest, write_tensors
from dulbe_peft.utils.torch_settings import without_autocast

FORMAT = "dulbe-occupation-statistics-1"


class _Layout(Record):
    """The metadata of a file: for each matrix, the layers that share it; and the digest of layers and matrices."""

    groups: list[Annotated[list[str], MinLen(1)]]
    sha256: str | None = None
    strategy: str | None = None


def _digest(tensors: Mapping[str, torch.Tensor], groups: Iterable[Sequence[str]]) -> str:
    return tensors_digest({str(list(names)): tensors[names[0]] for names in groups})


class OccupationStatistics(Mapping[str, torch.Tensor]):
    """A mapping of layer name -> S, (d_in, d_in), float32: uncentred, unnormalised sums over all tasks so far.

    Layers that are updated together share one matrix object: `stats["a"] is stats["b"]`.

    Reference:
        "Historical Visual-Mode Occupation", S_<t.
    """

    def __init__(self) -> None:
        self._matrices: dict[str, torch.Tensor] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._matrices[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._matrices)

    def __len__(self) -> int:
        return len(self._matrices)

    # Mapping compares items, which is ambiguous for tensors.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        size = f"{self.nbytes / 2**20:.2f} MiB"
        return f"OccupationStatistics({len(self)} layers, {len(self.groups)} matrices, {size})"

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The layers, grouped by the matrix they share, in the order in which they were added."""
        groups: dict[int, list[str]] = {}
        for name, matrix in self._matrices.items():
            groups.setdefault(id(matrix), []).append(name)
        return tuple(tuple(names) for names in groups.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the distinct matrices."""
        return sum(self._matrices[names[0]].nbytes for names in self.groups)

    def update(self, names: str | Sequence[str], tokens: torch.Tensor) -> None:
        """Add X'X, for tokens X, (..., d_in), to S of one layer or of layers that read the same tensor.

        After an error nothing is changed.
        """
        group = (names,) if isinstance(names, str) else tuple(names)
        if tokens.ndim < 2 or not tokens.numel():
            raise ValueError(f"tokens of {group} must be (..., d_in) and not empty, got {tuple(tokens.shape)}")
        self.add({group: mirrored(accumulate(None, tokens))})

    def merge(self, other: Self) -> None:
        """Add the sums of another object. After an error nothing is changed."""
        terms = {names: other[names[0]] for names in other.groups}
        self.add({names: term if names[0] in self else term.clone() for names, term in terms.items()})

    def add(self, terms: Mapping[tuple[str, ...], torch.Tensor]) -> None:
        """Add sums X'X, keyed by the layers that share them. After an error nothing is changed.

        The tensors of new layers are kept, not copied.
        """
        for names, term in terms.items():
            self._check(names, term)
        for names, term in terms.items():
            if names[0] in self._matrices:
                self._matrices[names[0]] += term.to(self._matrices[names[0]].device)
            else:
                self._matrices.update(dict.fromkeys(names, term))

    def _check(self, names: tuple[str, ...], term: torch.Tensor) -> None:
        """Raise an error if a term does not fit the earlier inputs of its layers or makes a sum that is not finite."""
        for group in self.groups:
            if not set(group).isdisjoint(names) and set(group) != set(names):
                raise ValueError(f"layers {list(names)} read one tensor, but so far {list(group)} share one matrix")
        old = self._matrices.get(names[0])
        if old is not None and old.shape[1] != term.shape[1]:
            raise ValueError(f"layer {names[0]!r} reads {term.shape[1]} features, but has read {old.shape[1]} so far")
        # No entry of a sum of X'X exceeds its largest diagonal entry, so checking the diagonal is enough.
        diagonal = term.diagonal()
        if old is not None:
            diagonal = diagonal.to(old.device) + old.diagonal()
        if not torch.isfinite(diagonal).all():
            raise ValueError(f"input of layer {names[0]!r} holds NaN or infinity, or its squares overflow float32")

    def save(self, path: str | Path, strategy: str | None = None) -> None:
        """Write a safetensors file with each distinct matrix once. Its metadata says which layers share a matrix.

        `strategy` names the strategy whose memory the statistics are.
        """
        tensors = {names[0]: self._matrices[names[0]] for names in self.groups}
        digest = _digest(tensors, self.groups)
        layout = _Layout(groups=[list(names) for names in self.groups], sha256=digest, strategy=strategy)
        write_tensors(path, tensors, {FORMAT: layout.model_dump_json()})

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "cpu", strategy: str | None = None) -> Self:
        """Load a file that `save` wrote, onto a device.

        A file that is damaged or foreign, or not of the `strategy` if one is given, raises a `ValueError`.
        """
        tensors, metadata = read_tensors(path)
        if FORMAT not in metadata:
            raise ValueError(f"{path} has format {sorted(metadata)}, expected {FORMAT!r}")
        try:
            layout = _Layout.model_validate_json(metadata[FORMAT])
        except ValidationError as error:
            raise ValueError(f"{path}: metadata is damaged or foreign: {first_problem(error)}") from error
        if strategy is not None and layout.strategy != strategy:
            raise ValueError(f"{path} is the memory of the strategy {layout.strategy!r}, expected {strategy!r}")
        if {group[0] for group in layout.groups} != set(tensors):
            raise ValueError(f"{path} holds matrices {sorted(tensors)}, its metadata lists {layout.groups}")
        stats = cls()
        for group in layout.groups:
            matrix = tensors[group[0]]
            if matrix.ndim != 2 or not 0 < len(matrix) == matrix.shape[1] or matrix.dtype != torch.float32:
                kind = f"(d_in, d_in), float32, got {tuple(matrix.shape)}, {matrix.dtype}"
                raise ValueError(f"{path}: matrix of {group[0]!r} must be {kind}")
            check_symmetric(matrix, f"{path}: matrix of {group[0]!r}")
            stats._matrices.update(dict.fromkeys(group, matrix.to(device)))
        if layout.sha256 not in (None, _digest(tensors, layout.groups)):
            raise ValueError(f"{path} is damaged: its matrices do not have the SHA-256 in its metadata")
        return stats


def summed(terms: dict[tuple[str, ...], torch.Tensor], device: torch.device) -> dict[tuple[str, ...], torch.Tensor]:
    """Return the sums X'X over all processes, keyed by the layers that share them.

    Every process must call this function. A process without images passes no terms.
    """
    layouts = gather_objects([(names, tuple(term.shape)) for names, term in terms.items()])
    layout = next(filter(None, layouts), [])
    if any(other and other != layout for other in layouts):
        raise ValueError("the processes disagree about which layers share an input tensor")
    terms = terms or {names: torch.zeros(shape, device=device) for names, shape in layout}
    for term in terms.values():
        sum_over_processes([term])
    return terms


def accumulate(total: torch.Tensor | None, tokens: torch.Tensor) -> torch.Tensor:
    """Add X'X, over all leading dimensions of X, to `total` in place and return it; float32.

    Only the diagonal blocks and the blocks above them are computed: see `mirrored`.
    """
    with torch.no_grad(), without_autocast(tokens):
        rows = tokens.detach().reshape(-1, tokens.shape[-1]).float()
        total = rows.new_zeros(rows.shape[1], rows.shape[1]) if total is None else total
        for block in _blocks(len(total)):
            total[block, block.start :].addmm_(rows[:, block].T, rows[:, block.start :])
    return total


def mirrored(total: torch.Tensor) -> torch.Tensor:
    """Copy the upper triangle into the lower one, in place, and return the matrix."""
    for block in _blocks(len(total)):
        square = total[block, block]
        square.copy_(square.triu() + square.triu(1).T)
        total[block.stop :, block] = total[block, block.stop :].T
    return total


def _blocks(width: int) -> list[slice]:
    """Return blocks of columns. Fewer blocks compute more of the lower triangle; more blocks make slower products."""
    size = max(64, width // 6)
    return [slice(start, min(start + size, width)) for start in range(0, width, size)]
