"""examples:
  python -m research verify
  python -m research verify --level 1 --data cifar100
  python -m research verify --level 2 --data pets --splits split_zhou_OxfordPets.json
  python -m research verify --checks my.yaml --output mine.json
  python -m research verify --run out

The exit status is 1 if a number is outside its tolerance, and 2 if a check could not be run.
"""

from pathlib import Path
from typing import Literal

from dulbe_peft.photos.commands.flags import OVERWRITE, File, Folder
from dulbe_peft.photos.commands.options import command
from dulbe_peft.photos.commands.paths import claim
from dulbe_peft.utils.settings import setting


@command(kept="the checks that were measured are kept")
def verify(
    level: Literal["0", "1", "2"] | None = setting(
        None, "0: one photograph; 1: zero-shot; 2: classifiers of a frozen model (default: 0)"
    ),
    data: str | None = setting(None, "run the checks of one data set, at all levels unless --level is given"),
    listed: bool = setting(False, "list the checks, and measure nothing", flag="--list"),
    checks: File | None = setting(None, "run your own checks, at all levels, instead of the project's"),
    splits: File | None = setting(None, "the split file of --data, if you must download it yourself"),
    images: Folder | None = setting(None, "the images of --data, if you have them already"),
    run: Folder | None = setting(None, "add a finished run of examples/papers to docs/reproduce.md"),
    output: File = setting("verify.json", "results, versions and hardware"),
    device: str = setting("auto", "auto, cpu or an accelerator's type"),
    overwrite: bool = OVERWRITE,
) -> int:
    if run is not None:
        from research.verification.reproduced import REPRODUCED, add_run

        name, ours = add_run(run, REPRODUCED)
        print(f"{name}: A_bar {ours.average:.2f}, A_last {ours.last:.2f} with {ours.classifier} and {ours.model}")
        print(f"written: {REPRODUCED}\nnext: python docs/generate.py tables")
        return 0
    from research.verification.checks import OWN_CHECKS, read_checks, select_checks

    file = OWN_CHECKS if checks is None else Path(checks)
    all_checks = read_checks(file)
    narrow = level is not None or data is not None or checks is not None or listed
    wanted = select_checks(all_checks, int(level) if level is not None else None if narrow else 0, data)
    if (splits or images) and len({check.data for check in wanted}) > 1:
        names = ", ".join(dict.fromkeys(check.data for check in wanted))
        raise ValueError(f"--splits and --images belong to one data set of {names}: choose it with --data")
    for flag, path in (("--splits", splits), ("--images", images)):
        if path is not None and not Path(path).exists():
            raise FileNotFoundError(f"{flag} {path!r} does not exist")
    if listed:
        for check in wanted:
            numbers = ", ".join(f"{value:g}" for value in check.expected)
            about = "" if check.confirmed else ", unconfirmed"
            print(f"{check.level}  {check.name}  {check.model}  {check.data}: {numbers} +- {check.tolerance:g}{about}")
            print(f"     {check.source}")
        return 0
    from dulbe_peft.utils.files import rename_to_old
    from research.verification.images import Places
    from research.verification.kit import NOT_RUN, OUTSIDE, Kit, table

    claim(("--output", output, ".json"), reads=[checks, splits], overwrite=overwrite)
    if overwrite and Path(output).is_file():
        rename_to_old(Path(output))
    places = Places(file.parent, Path(images) if images else None, Path(splits) if splits else None)
    outcomes = Kit(all_checks, places, Path(output), device).run(wanted)
    print("\n" + "\n".join(table(outcomes)))
    results = [outcome.within for outcome in outcomes]
    print(f"\n{results.count(OUTSIDE)} of {len(results)} outside, {results.count(NOT_RUN)} not run; written: {output}")
    return 1 if OUTSIDE in results else 2 if NOT_RUN in results else 0
