"""Test strategies with a head of their own on models without a text tower, which learn like others."""

import copy
from functools import cache

import pytest
import torch
from lives import images_of, learned
from peft import get_peft_model
from tiny_encoders import IMAGE_ONLY, make_model, make_processor, save_encoder

from dulbe_peft import ClassIncrementalLearner, DualModeLoraConfig, LearnerArguments, load_dual_encoder
from dulbe_peft.encoders.loading import ImageOnlyProcessor

PIXELS = [pixels for pixels, _ in images_of(0, 1, 2, 3, 0, 1, 2, 3, 0, seed=9)]  # more than a batch
SPECS = {  # strategy -> its first classifier
    "dualprompt:general_blocks=1,head=linear": "linear_head",
    "coda_prompt:components=3,head=linear": "linear_head",
    "l2p:pool=6,length=4,chosen=2,blocks=2,head=linear": "linear_head",
    "aper:bottleneck=4,head=cosine": "prototype",
}
EVERY = [(model_type, spec) for model_type in IMAGE_ONLY for spec in SPECS]
FAST = (IMAGE_ONLY[0], "dualprompt:general_blocks=1,head=linear")


def learner_of(given, spec, classifiers=None, **fields):
    model, processor = given
    # These strategies train no adapter, so one layer of each block has one. DINOv3 calls it by another name.
    model = get_peft_model(model, DualModeLoraConfig(residual_rank=2, target_modules=["fc1", "up_proj"]))
    args = LearnerArguments(device="cpu", progress=False, epochs=2, batch_size=4, **{"learning_rate": 1e-2} | fields)
    return ClassIncrementalLearner(model, processor, args=args, strategy=spec, classifiers=classifiers)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a function that gives the model and the processor of a type, loaded from the folder that it saved."""
    return cache(lambda kind: load_dual_encoder(str(save_encoder(kind, tmp_path_factory.mktemp(kind)))))


@pytest.mark.parametrize(
    ("model_type", "spec"), [pair if pair == FAST else pytest.param(*pair, marks=pytest.mark.slow) for pair in EVERY]
)
def test_learns_two_tasks_saves_and_loads_without_names(tmp_path, saved, model_type, spec):
    model, processor = saved(model_type)
    # The default classifiers are those of the strategy on every model, and `bayes` takes longer than a task.
    few = None if model_type == IMAGE_ONLY[0] else (SPECS[spec], "lda")
    learner = learner_of((copy.deepcopy(model), processor), spec, few)
    assert next(iter(learner.classifiers)) == SPECS[spec]
    untrained = learner.image_embeds(PIXELS[:4])
    learned(learner, 2)
    together = learner.image_embeds(PIXELS)
    assert together.shape[1] > untrained.shape[1] or (together[:4] - untrained).abs().max() > 1e-4
    for row in (0, 5, 8):  # one image has the feature that it has together with others
        torch.testing.assert_close(learner.image_embeds([PIXELS[row]])[0], together[row], rtol=0, atol=1e-6)
    learner.save_pretrained(tmp_path / "saved")
    loaded = ClassIncrementalLearner.from_pretrained(tmp_path / "saved")
    assert torch.equal(loaded.image_embeds(PIXELS), together) and loaded.predict(PIXELS) == learner.predict(PIXELS)
    learned(loaded, 1, 2)
    assert len(loaded.class_names) == 6


@pytest.mark.parametrize("spec", ["dualprompt", "moe_adapters", "lora", "aper", "lfi"])
def test_strategies_that_train_with_names_are_refused_in_one_sentence(spec):
    given = make_model(IMAGE_ONLY[0]), ImageOnlyProcessor(make_processor(IMAGE_ONLY[0]))
    with pytest.raises(ValueError, match="has no text tower, but texts are needed here: use a model of type 'clip'"):
        learner_of(given, spec)


def test_tokens_are_refused_in_one_sentence():
    given = make_model("vit"), ImageOnlyProcessor(make_processor("vit"))
    with pytest.raises(ValueError, match="tower like CLIP's, and a ViTModel has none: use form=prefix"):
        learned(learner_of(given, "l2p:form=tokens,head=linear"), 1)
