"""How good `advise` is: its advice from held-back training images against a full comparison on the test images.

    python -m benchmarks.advising examples/comparisons/digits.yaml --comparison comparison --output advising

For every stream and seed of a finished comparison, `advise` chooses among the comparison's own rows. Its regret is how
far the advised row is below the best one on the test images. Beside it stands the regret of the row that is best on
average over all streams and seeds, which somebody who never measures would choose at best.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dulbe_peft.comparison.advice import advise
from dulbe_peft.comparison.cells import read_cell
from dulbe_peft.comparison.compare import shares_of
from dulbe_peft.comparison.plan import Plan, Row, read_plan
from dulbe_peft.utils.files import write_json


def main(argv: Sequence[str] | None = None) -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("file", help="the comparison's YAML file")
    options.add_argument("--comparison", required=True, help="folder of the finished comparison")
    options.add_argument("--output", required=True, help="folder for the runs of `advise` and advising.json")
    options.add_argument("--jobs", type=int, default=1)
    options.add_argument("--no-training", action="store_true", help="choose among the rows without training")
    values = options.parse_args(argv)
    plan, output = read_plan(values.file), Path(values.output)
    found = measured(plan, Path(values.comparison), values.no_training)
    average = best_on_average(found)
    rows = []
    for (stream, seed), figures in found.items():
        chosen = advised(plan, stream, seed, Path(values.comparison), output, values)
        best = max(figures, key=figures.__getitem__)
        row = {
            "stream": stream,
            "seed": seed,
            "advised": chosen.title,
            "best": best.title,
            "regret": figures[best] - figures[chosen],
            "regret of the best on average": figures[best] - figures[average],
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
    summary = {name: statistics.fmean(row[name] for row in rows) for name in rows[0] if name.startswith("regret")}
    summary |= {"best on average": average.title, "largest regret": max(row["regret"] for row in rows)}
    write_json(output / "advising.json", {"rows": rows, "summary": summary})
    print(json.dumps(summary))


def measured(plan: Plan, comparison: Path, no_training: bool) -> dict[tuple[str, int], dict[Row, float]]:
    """(stream, seed) -> row -> A_last on the test images, of all rows that are finished."""
    found: dict[tuple[str, int], dict[Row, float]] = {}
    for cell in plan.cells():
        rows = [] if no_training and plan.strategy(cell.method).adapts else plan.rows(cell.method)
        for row in rows:
            shares = shares_of(comparison / cell.folder, row)
            if shares is not None:
                found.setdefault((cell.stream, cell.seed), {})[row] = float(shares.mean())
    return found


def best_on_average(found: dict[tuple[str, int], dict[Row, float]]) -> Row:
    """The row with the best mean over all streams and seeds."""
    common = set.intersection(*(set(figures) for figures in found.values()))
    return max(sorted(common, key=str), key=lambda row: statistics.fmean(figures[row] for figures in found.values()))


def advised(plan: Plan, stream: str, seed: int, comparison: Path, output: Path, values: Any) -> Row:
    """The row that `advise` chooses for a stream and a seed."""
    seeds = {"order_seed": seed, "draw_seed": seed}
    trials = {}
    for cell in plan.cells():
        if (cell.stream, cell.seed) == (stream, seed) and plan.strategy(cell.method).adapts and not values.no_training:
            done = read_cell(comparison / cell.folder)
            if done is not None:  # with the settings that the comparison has chosen
                chosen = {name: done.settings[name] for name in plan.choices.get(cell.method, {})}
                trials[cell.method] = plan.methods[cell.method] | chosen
    settings = seeds | plan.streams[stream]
    folder = output / f"{stream}, seed {seed}"
    advice = advise(settings, folder, values.jobs, plan.classifiers, trials, seed, plan.drifts, log=lambda _: None)
    if advice.training is not None and advice.training.clear:
        return advice.training.row
    frozen = next(method for method in plan.methods if not plan.strategy(method).adapts)
    return Row(frozen, advice.settings["classifiers"])


if __name__ == "__main__":
    main()
