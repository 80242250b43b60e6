"""Zero-shot retention: how well a model still recognises classes by their names, including classes it never learned.

All figures are accuracies of the text classifier, which predicts the class whose text embedding is nearest to the
image's feature. A test set is a pair of images and the class names that their labels index.
"""

from collections.abc import Sequence
from typing import Any

from dulbe_peft.data.images import named_images
from dulbe_peft.learner import ClassIncrementalLearner
from dulbe_peft.utils.settings import check_number

Tests = Sequence[tuple[object, Sequence[str]]]


def zero_shot_retention(
    learner: ClassIncrementalLearner,
    dataset: object,
    class_names: Sequence[str] | None = None,
    scales: Sequence[float] = (1.0,),
    learned: Tests = (),
) -> dict[str, Any]:
    """Measure the accuracy on classes that a learner never learned, before and after learning, and at smaller scales.

    Args:
        learner: The learner to measure.
        dataset: Images of classes that were not learned. The text classifier chooses among these classes.
        class_names: The names of the classes in `dataset`. None takes the names that `dataset` has.
        scales: How much of the learned update to use, see `ClassIncrementalLearner.scaled`. 0 and 1 are always used.
        learned: Test sets of learned classes. For these, the text classifier chooses among the classes in `learned`.

    Returns:
        A dict with "before" and "after", the accuracies on `dataset` of the pristine model and of the learner, and
        "scales", a list in ascending order of dicts with "scale", "unlearned" (the accuracy on `dataset`) and
        "learned" (the accuracy on `learned`, or None without it).

    Reference:
        Wortsman et al., "Robust fine-tuning of zero-shot models", 2022: the curve over the scale.
    """
    dataset = named_images(dataset, class_names)
    for scale in scales:
        check_number("scale", scale, least=0, most=1)
    groups: list[Tests] = [[(dataset, dataset.class_names)], *([learned] if learned else [])]
    rows = []
    for scale in sorted({0.0, 1.0, *scales}):
        if scale == 0:
            accuracies = [learner.zero_shot(tests)[-1] for tests in groups]
        else:
            with learner.scaled(scale):
                accuracies = [learner.text_accuracies(tests)[-1] for tests in groups]
        row = {"scale": float(scale), "unlearned": accuracies[0], "learned": accuracies[1] if learned else None}
        rows.append(row)
    return {"before": rows[0]["unlearned"], "after": rows[-1]["unlearned"], "scales": rows}
