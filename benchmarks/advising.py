"""How good `advise` is: its advice from held-back training images against full comparisons on the test images.

    python -m benchmarks.advising examples/comparisons/digits.yaml=comparison --output advising --no-training

Each argument is the file of a comparison and the folder that `dulbe-peft compare` has finished. For every stream and
seed, `advise` chooses among the comparison's own rows. Its regret is how far the advised row is below the best one on
the test images. Beside it stands the regret of the row that is best on average over all *other* streams, which
somebody who never measures would choose at best. The interval is that of the mean over the streams, by Student's t.
`--keep` writes the summary to where `advise` reads it.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scipy.stats import t

import dulbe_peft
from dulbe_peft.comparison.advice import Regret, advise
from dulbe_peft.comparison.compare import shares_of
from dulbe_peft.comparison.comparison_file import read_comparison
from dulbe_peft.comparison.plan import Cell, Plan, Row, read_plan
from dulbe_peft.utils.files import write_json
from dulbe_peft.utils.records import write_record

Found = dict[tuple[str, int], dict[Row, float]]  # (stream, seed) -> row -> A_last on the test images


def main(argv: Sequence[str] | None = None) -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("pairs", nargs="+", metavar="FILE=FOLDER", help="a comparison's file and its finished folder")
    options.add_argument("--output", required=True, help="folder for the runs of `advise` and advising.json")
    options.add_argument("--jobs", type=int, default=1)
    options.add_argument("--no-training", action="store_true", help="choose among the rows without training")
    options.add_argument("--keep", action="store_true", help="put the summary where `advise` reads it")
    values = options.parse_args(argv)
    rows, found = [], dict[tuple[str, int], dict[Row, float]]()
    for pair in values.pairs:
        file, _, folder = pair.partition("=")
        plan, comparison = read_plan(file), Path(folder)
        own = measured(plan, comparison, values.no_training)
        found |= {(f"{Path(file).stem}: {stream}", seed): figures for (stream, seed), figures in own.items()}
        for (stream, seed), figures in own.items():
            output = Path(values.output) / Path(file).stem / f"{stream}, seed {seed}"
            chosen = advised(plan, stream, seed, comparison, output, values)
            best = max(figures, key=figures.__getitem__)
            regret = figures[best] - figures[chosen]
            named = {"stream": f"{Path(file).stem}: {stream}", "seed": seed, "advised": chosen.title}
            rows.append({**named, "best": best.title, "regret": regret})
            print(json.dumps(rows[-1]), flush=True)
    for row in rows:
        row["regret of the best elsewhere"] = regret_of_best_elsewhere(found, row["stream"], row["seed"])
    summary = summarised((row["stream"], row["regret"]) for row in rows)
    usual = [row["regret of the best elsewhere"] for row in rows]
    elsewhere = None if None in usual else statistics.fmean(usual)
    content = {"rows": rows, "summary": summary.model_dump(), "regret of the best elsewhere": elsewhere}
    write_json(Path(values.output) / "advising.json", content)
    if values.keep:
        write_record(Path(dulbe_peft.__file__).parent / "assets" / "advice" / "regret.json", summary)
    print(json.dumps(content["summary"] | {"regret of the best elsewhere": elsewhere}))


def summarised(regrets: Iterable[tuple[str, float]]) -> Regret:
    """The mean over streams of their means over seeds, with its interval, of pairs (stream, regret)."""
    streams: dict[str, list[float]] = {}
    for stream, regret in regrets:
        streams.setdefault(stream, []).append(regret)
    means = [statistics.fmean(values) for values in streams.values()]
    mean, half = statistics.fmean(means), 0.0
    if len(means) > 1:
        half = float(t.ppf(0.975, len(means) - 1)) * statistics.stdev(means) / len(means) ** 0.5
    cases = [value for values in streams.values() for value in values]
    low = max(0.0, mean - half)  # no advice is better than the best row
    return Regret(streams=len(means), cases=len(cases), mean=mean, low=low, high=mean + half, largest=max(cases))


def regret_of_best_elsewhere(found: Mapping[tuple[str, int], Mapping[Row, float]], stream: str, seed: int) -> Any:
    """What the row that is best on average over all other streams loses here; None without another stream."""
    others = [figures for (name, _), figures in found.items() if name != stream]
    here = found[stream, seed]
    common = set(here).intersection(*others) if others else set()
    if not common:
        return None
    row = max(sorted(common, key=str), key=lambda row: statistics.fmean(figures[row] for figures in others))
    return max(here.values()) - here[row]


def measured(plan: Plan, comparison: Path, no_training: bool) -> Found:
    """A_last on the test images of all rows that are finished."""
    found: Found = {}
    for cell, rows in runs(plan, comparison):
        for row in [] if no_training and plan.strategy(cell.method).adapts else rows:
            shares = shares_of(comparison / cell.folder, row)
            if shares is not None:
                found.setdefault((cell.stream, cell.seed), {})[row] = float(shares.mean())
    return found


def runs(plan: Plan, comparison: Path) -> list[tuple[Cell, list[Row]]]:
    """The runs of a comparison with the rows that each serves, as it has chosen their settings."""
    return plan.cells({(entry.stream, entry.row): entry.chosen for entry in read_comparison(comparison).entries})


def advised(plan: Plan, stream: str, seed: int, comparison: Path, output: Path, values: Any) -> Row:
    """The row that `advise` chooses for a stream and a seed."""
    trials: dict[str, dict[str, Any]] = {}
    # With the settings that most rows of a method have chosen.
    for cell, _ in sorted(runs(plan, comparison), key=lambda pair: len(pair[1])):
        if (cell.stream, cell.seed) == (stream, seed) and plan.strategy(cell.method).adapts and not values.no_training:
            chosen = {name: cell.settings[name] for name in plan.choices.get(cell.method, {})}
            trials[cell.method] = plan.methods[cell.method] | chosen
    # The comparison has no rows with augmented views.
    settings = {"order_seed": seed, "draw_seed": seed, "augment": "none"} | plan.streams[stream]
    specs, drifts = plan.classifiers, plan.drifts
    advice = advise(settings, output, values.jobs, specs, trials, seed, drifts, log=lambda _: None)
    if advice.training is not None and advice.training.clear:
        return advice.training.row
    frozen = next(method for method in plan.methods if not plan.strategy(method).adapts)
    return Row(frozen, advice.settings["classifiers"])


if __name__ == "__main__":
    main()
