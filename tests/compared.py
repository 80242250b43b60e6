"""A hand-written comparison of four rows on two streams."""

from dulbe_peft.utils.records import write_record
from research.comparison import cells
from research.comparison.comparison_file import COMPARISON_FILE, Comparison, Entry, Retention
from research.comparison.intervals import Difference
from research.comparison.plan import Plan, Row

REFERENCE = Row("frozen", "bridge")

CLEAR, UNCLEAR, WORSE = Difference(0.05, 0.02, 0.08), Difference(0.01, -0.02, 0.04), Difference(-0.1, -0.15, -0.05)


def wider(difference):
    """Return the difference with a point more at both ends of its interval."""
    return difference and Difference(difference.mean, difference.low - 0.01, difference.high + 0.01)


def around(mean):
    return Difference(mean, mean - 0.01, mean + 0.01)


def entry(row, last, difference=None, stream="4 images", seeds=(0, 1, 2), retention=None, chosen=None, behind=None):
    spread = 0.01234 if len(seeds) > 1 else None
    return Entry(
        stream=stream,
        row=row,
        chosen=chosen or {},
        seeds=seeds,
        means={"last": last, "average": last + 0.03, "forgetting": 0.02},
        spreads={"last": spread, "average": spread, "forgetting": None},
        intervals={"last": around(last), "average": around(last + 0.03), "forgetting": around(0.02)},
        differences={"last": difference, "average": difference},
        corrected={"last": wider(difference)},
        behind={"last": behind},
        gain=None if row.method == REFERENCE.method else difference,
        calibration_error=0.0789,
        seconds=12.4,
        cpu_seconds=9.6,
        curve=[last + 0.06, last],
        trainable_parameters=28800,
        passes=1,
        peak_bytes=700 * 2**20,
        budget="epochs 2, batch 32, rate 0.001",
        kept_bytes=3 * 2**20,
        retention=retention,
    )


def made_comparison(names=("4 images", "16 images"), method="DuLBE", classifier="lda"):
    """Return a comparison of four rows on two streams. The second stream lacks a row, and a seed of another row."""
    other, moved, best = Row(method, classifier), Row(method, classifier, "linear"), Row("frozen", "ranpac:features=9")
    known = Retention(before=0.9, after=0.85)
    entries = [
        entry(REFERENCE, 0.8, None, names[0], retention=Retention(before=0.9, after=0.9), behind=WORSE),
        entry(best, 0.81, UNCLEAR, names[0], behind=Difference(-0.04, -0.09, 0.01)),
        entry(other, 0.85, CLEAR, names[0], retention=known, chosen={"learning_rate": 1e-3}),
        entry(moved, 0.7, WORSE, names[0], retention=known, chosen={"learning_rate": 1e-3}, behind=WORSE),
        entry(REFERENCE, 0.9, None, names[1]),
        entry(best, 0.91, UNCLEAR, names[1]),
        entry(other, 0.9, UNCLEAR, names[1], seeds=(0, 1)),
    ]
    settings = {"model": "demo", "data": "demo-digits"}
    streams = {name: {**settings, "images_per_class": count} for name, count in zip(names, (4, 16), strict=True)}
    methods = {"frozen": {"strategy": "frozen"}, method: {"strategy": "dulbe"}}
    choices = {method: {"learning_rate": [1e-4, 1e-3]}}
    rows = (REFERENCE, best, other, moved)
    scope = Plan(streams=streams, methods=methods, choices=choices, rows=rows, seeds=(0, 1, 2), reference=REFERENCE)
    return Comparison(entries=entries, scope=scope, gains={names[0]: CLEAR, names[1]: UNCLEAR})


def without_times(entries):
    return [entry.model_copy(update={"seconds": 0.0, "cpu_seconds": 0.0, "peak_bytes": None}) for entry in entries]


def write_into(comparison, folder):
    write_record(folder / COMPARISON_FILE, comparison)


def forget_fingerprints():
    """Forget the fingerprints of images and models, as in another process."""
    for function in (cells._fingerprints, cells._never_learned_fingerprint, cells.cached_model_fingerprint):
        function.cache_clear()


def with_other_weights(model):
    """Change the last weight in a model's folder."""
    path = model / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)
    forget_fingerprints()
