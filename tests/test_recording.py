"""Features that a run keeps: other classifiers learn from them what they would have learned while it ran."""

import copy

import pytest
import torch
from peft import get_peft_model
from small_runs import QUICK, tasks_of

from dulbe_peft import ClassIncrementalLearner, DualModeLoraConfig, LearnerArguments
from dulbe_peft.metrics.features import learn_from_features, read_features
from dulbe_peft.runs.progress import known_tasks

CLASSIFIERS = ("bridge", "text", "prototype", "lda", "ridge", "ranpac:features=50")


@pytest.fixture(scope="module", params=["none", "linear"])
def run(request, base, digit_folders, tmp_path_factory):
    """A stream of two tasks that DuLBE has trained with all classifiers and kept the features of."""
    torch.set_num_threads(1)
    clip, processor = base
    torch.manual_seed(0)
    model = get_peft_model(copy.deepcopy(clip), DualModeLoraConfig(residual_rank=2, support_rank=8))
    args = LearnerArguments(**QUICK, drift=request.param)
    learner = ClassIncrementalLearner(model, processor, args=args, classifiers=CLASSIFIERS)
    folder = tmp_path_factory.mktemp("run")
    learner.run(tasks_of(digit_folders(4, 6, 3)), folder, keep_features=True)
    return learner, folder


@pytest.mark.parametrize("spec", CLASSIFIERS)
def test_a_classifier_learns_from_features_what_it_learned_in_the_run(run, spec):
    learner, folder = run
    answers, replayed = learn_from_features(read_features(folder), spec, learner.logit_scale, learner.args.drift)
    taught = learner.classifiers[spec.partition(":")[0]]
    assert replayed.class_names == taught.class_names
    for name, tensor in taught.tensors().items():
        assert torch.equal(replayed.tensors()[name], tensor), name
    scores = [task.row.classifiers[taught.name] for task in known_tasks(learner)]
    assert [float(found.right.float().mean()) for found in answers] == pytest.approx(
        [score.accuracy for score in scores]
    )
    assert answers[-1].task.tolist() == [1] * 6 + [2] * 6
