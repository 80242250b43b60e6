"""Run checks one after the other, keep their results in one JSON file, and format the table of results."""

import os
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from dulbe_peft.data.store import store_path
from dulbe_peft.utils.folders import json_sha256, library_versions
from dulbe_peft.utils.records import Record, read_record, write_record
from research.verification.checks import Check, Checks
from research.verification.fetching import HUB, WEB, Fetcher, on_hub
from research.verification.images import Places
from research.verification.measuring import measure

WITHIN, OUTSIDE, UNCONFIRMED, NOT_RUN = "yes", "NO", "unconfirmed", "not run"


class Outcome(Record):
    """The result of a check, or the problem that prevented it."""

    row: str  # digest of the check, its data, the versions and the machine
    check: Check
    here: tuple[float, ...] = ()
    beside: dict[str, float] = {}
    seeds: dict[str, tuple[float, ...]] = {}
    seconds: float = 0.0
    problem: str = ""

    @property
    def within(self) -> str:
        """Say whether every number is within the tolerance of the published one; an unconfirmed check cannot fail."""
        if self.problem:
            return NOT_RUN
        if not self.check.confirmed:
            return UNCONFIRMED
        pairs = zip(self.check.expected, self.here, strict=True)
        return WITHIN if all(abs(published - here) <= self.check.tolerance for published, here in pairs) else OUTSIDE


class Results(Record):
    """The content of the JSON file. `known` has the hashes and commits that were seen at the first download."""

    format: str = "dulbe_peft verify 1"
    versions: dict[str, str] = {}
    machine: dict[str, str] = {}
    known: dict[str, str] = {}
    outcomes: tuple[Outcome, ...] = ()


@dataclass
class Kit:
    """Runs checks, given the paths of their data and the file for the results."""

    checks: Checks
    places: Places
    output: Path
    device: str

    def run(self, wanted: Sequence[Check]) -> list[Outcome]:
        """Measure the checks that the file does not hold yet, and write each result as soon as it is measured."""
        results = read_record(self.output, Results) if self.output.exists() else Results()
        fetcher = Fetcher(store_path().parent / "verify", dict(results.known))
        versions, machine = library_versions(), machine_facts(self.device)
        kept = {outcome.check.name: outcome for outcome in results.outcomes}
        if kept and (results.versions, results.machine) != (versions, machine):
            print(f"{self.output} is from other versions or another machine: its checks are measured again")
        rows = {check.name: self._digest(check, versions, machine) for check in wanted}
        measured = {outcome.row for outcome in results.outcomes if not outcome.problem}
        missing = [check for check in wanted if rows[check.name] not in measured]
        for name in sorted(rows.keys() - {check.name for check in missing}):
            print(f"{name}: measured before")
        self._print_sizes(missing, fetcher)
        for check in missing:
            before = set(fetcher.known)
            kept[check.name] = self._measured(check, rows[check.name], fetcher)
            outcomes, known = tuple(kept.values()), dict(fetcher.known)
            write_record(self.output, Results(versions=versions, machine=machine, known=known, outcomes=outcomes))
            for name in [name for name in known if name not in before]:
                print(f"seen for the first time, and recorded: {name} {known[name]}")
        return [kept[check.name] for check in wanted]

    def _measured(self, check: Check, row: str, fetcher: Fetcher) -> Outcome:
        print(f"{check.name} ...")
        began = time.perf_counter()
        try:
            here, seeds = measure(check, self.checks.data[check.data], self.places, fetcher, self.device)
        except (OSError, ValueError, TypeError, ImportError) as error:
            why = " ".join(str(error).split())
            print(f"{check.name}: not run: {why}")
            return Outcome(row=row, check=check, problem=why)
        seconds = round(time.perf_counter() - began, 1)
        beside = {name: fmean(values) for name, values in list(seeds.items())[1:]}
        return Outcome(row=row, check=check, here=here, beside=beside, seeds=seeds, seconds=seconds)

    def _digest(self, check: Check, versions: dict[str, str], machine: dict[str, str]) -> str:
        """Return a digest of all that a number depends on; if the digest has changed, the number is measured again."""
        records = [record.model_dump(mode="json") for record in (check, self.checks.data[check.data])]
        places = [str(place and place.resolve()) for place in (self.places.images, self.places.splits)]
        return json_sha256([*records, places, versions, machine])[:16]

    def _print_sizes(self, wanted: Sequence[Check], fetcher: Fetcher) -> None:
        """Print the sizes of all downloads before the first one begins."""
        sizes = {name: size for name, size in self._sizes(wanted, fetcher) if size != 0}
        for name, size in sizes.items():
            print(f"to download: {name}, {'of unknown size' if size is None else f'{size / 1e6:,.1f} MB'}")
        if sizes:
            known = f"{sum(filter(None, sizes.values())) / 1e6:,.1f} MB"
            unknown = list(sizes.values()).count(None)
            more = f", and {unknown} of unknown size" if unknown else ""
            print(f"to download: {known}{more}; kept in {fetcher.folder} or in the Hub's cache")

    def _sizes(self, wanted: Sequence[Check], fetcher: Fetcher) -> Iterator[tuple[str, int | None]]:
        for check in wanted:
            if on_hub(check.model):
                pinned = check.revision or fetcher.known.get(check.model)
                yield check.model, fetcher.hub_size(check.model, "model", (), pinned)
            data = self.checks.data[check.data]
            if data.splits is not None and data.splits.url and self.places.splits is None:
                yield data.splits.url, fetcher.size(data.splits.url)
            if self.places.images is not None:
                continue
            if data.source.startswith(WEB):
                yield data.source, fetcher.size(data.source)
            elif data.source.startswith(HUB):
                splits = [check.split, "train"] if check.measure == "taught" else [check.split]
                patterns = {data.files[split] for split in splits if split in data.files}
                pinned = data.revision or fetcher.known.get(data.source)
                title = f"{data.source} ({', '.join(sorted(patterns))})"
                yield title, fetcher.hub_size(data.source.removeprefix(HUB), "dataset", patterns, pinned)


def machine_facts(device: str) -> dict[str, str]:
    """Describe the machine: platform, processor, number of cores, device, and the accelerator if one is used."""
    import torch

    facts = {"platform": platform.platform(), "processor": torch.backends.cpu.get_cpu_capability()}
    facts |= {"cores": str(os.cpu_count()), "device": device}
    if device != "cpu" and torch.accelerator.is_available():
        kind = str(torch.accelerator.current_accelerator())
        facts["accelerator"] = torch.cuda.get_device_name() if kind.startswith("cuda") else kind
    return facts


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the lines of a table with the published number, ours, the tolerance, and whether ours is within it."""
    rows = [("check", "published", "here", "+-", "within")]
    for outcome in outcomes:
        check = outcome.check
        digits = 4 if check.level == 0 else 2
        here: list[float | None] = list(outcome.here) or [None] * len(check.expected)
        parts = check.texts if check.texts else [""] * len(here)
        for number, (published, value) in enumerate(zip(check.expected, here, strict=True)):
            name = f"{check.name} {parts[number] or (number if len(here) > 1 else '')}".strip()
            cells = (f"{published:.{digits}f}", "" if value is None else f"{value:.{digits}f}", f"{check.tolerance:g}")
            rows.append((name, *cells, "" if number else outcome.within))
        rows += [(f"    {name}", "", f"{value:.{digits}f}", "", "beside it") for name, value in outcome.beside.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(f"{cell:{side}{w}}" for cell, side, w in zip(row, "<>>><", widths)) for row in rows)
    return [line.rstrip() for line in lines]
