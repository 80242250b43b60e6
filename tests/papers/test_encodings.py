"""Test what every strategy promises that changes how images are encoded: prompts, two towers, and experts."""

import copy
import json
import threading
from dataclasses import replace
from functools import cache

import pytest
import torch
from lives import images_of, learned, tiny_base, tiny_learner
from processes import run
from tiny_encoders import save_encoder
from torch import nn

from dulbe_peft import ClassIncrementalLearner
from dulbe_peft.checkpoints import saving
from dulbe_peft.encoders.encoding import hooked
from dulbe_peft.photos.deployment.formats import export_learner
from dulbe_peft.utils.folders import commit_folder

SPECS = (
    "dualprompt:general_blocks=1",
    "dualprompt:general_blocks=1,head=linear",
    "coda_prompt:components=3",
    "l2p:pool=6,length=4,chosen=2,blocks=2",
    "l2p:form=tokens,chosen=2",
    "l2p:form=tokens,chosen=2,head=linear",
    "aper:bottleneck=4",
    "moe_adapters:bottleneck=4",
    "loda:towers=2",
    "vis:hidden=8",
)
IMAGES = images_of(0, 1, 2, 3, 0, 1, 2, 3, seed=9) * 3


@pytest.fixture(scope="module")
def learner_of(tmp_path_factory):
    """Return a function that returns a learner of two tasks; the same strategy learns once."""
    model = tiny_base()[0]
    model.name_or_path = model.config.name_or_path = str(save_encoder("clip", tmp_path_factory.mktemp("base")))

    @cache
    def once(spec):
        classifiers = ("lda",) if spec.startswith("vis") else ("lda", "text")
        learner = learned(tiny_learner(spec, classifiers, epochs=1), 1)
        key, digest = learner.encoder.key, learner.encoder.encoding.digest
        learned(learner, 1, 1)
        # The first task alone trains `aper` and `vis`, and the weights of `loda` are in another part of the key.
        assert (learner.encoder.key == key) == (learner.strategy.name in ("aper", "vis"))
        assert (learner.encoder.encoding.digest == digest) == (learner.strategy.name in ("aper", "loda", "vis"))
        return learner

    yield once
    model.name_or_path = model.config.name_or_path = ""


@pytest.fixture(params=SPECS)
def two_tasks(request, learner_of):
    return learner_of(request.param)


@pytest.mark.plain("l2p:form=tokens,chosen=2", "moe_adapters:bottleneck=4")
def test_one_image_has_the_feature_that_it_has_in_a_batch_of_24(two_tasks):
    learner, pixels = two_tasks, [pixels for pixels, _ in IMAGES]
    together = learner.image_embeds(pixels)
    assert len(pixels) == 24 and (together[:4] - together[4:8]).abs().max() > 1e-3
    for row in (0, 5, 23):
        torch.testing.assert_close(learner.image_embeds([pixels[row]])[0], together[row], rtol=0, atol=1e-6)
        assert learner.predict(pixels[row]) == learner.predict(pixels)[row]


FRESH = """
import json, os, sys, torch
from dulbe_peft import ClassIncrementalLearner

pixels = list(torch.load("pixels.pt"))
for folder in sys.argv[1:]:
    if not os.fork():  # each learner has a process of its own, and this one only imports
        learner = ClassIncrementalLearner.from_pretrained(folder)
        values = learner.image_embeds(pixels).tolist(), learner.predict(pixels), learner.encoder.encoding.digest
        with open(folder + ".json", "w") as file:
            json.dump(values, file)
        break
    assert os.wait()[1] == 0, folder
"""


@pytest.mark.slow
def test_loaded_in_a_fresh_process_features_and_predictions_are_equal(learner_of, tmp_path):
    pixels = torch.stack([pixels for pixels, _ in IMAGES])
    torch.save(pixels, tmp_path / "pixels.pt")
    for spec in SPECS:
        learner_of(spec).save_pretrained(tmp_path / spec)
    done = run("-c", FRESH, *SPECS, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for spec in SPECS:
        learner = learner_of(spec)
        features, names, digest = json.loads((tmp_path / f"{spec}.json").read_text())
        assert names == learner.predict(list(pixels)) and digest == learner.encoder.encoding.digest, spec
        torch.testing.assert_close(torch.tensor(features), learner.image_embeds(list(pixels)), rtol=0, atol=1e-6)


@pytest.mark.plain("l2p:form=tokens,chosen=2", "moe_adapters:bottleneck=4")
def test_published_learner_without_statistics_still_has_its_prompts(two_tasks, tmp_path):
    learner, pixels = two_tasks, [pixels for pixels, _ in IMAGES]
    commit_folder(tmp_path / "up", "learner", lambda folder: saving.write(learner.state, folder, statistics=False))
    loaded = ClassIncrementalLearner.from_pretrained(tmp_path / "up", copy.deepcopy(tiny_base()[0]))
    assert torch.equal(loaded.image_embeds(pixels), learner.image_embeds(pixels))


@pytest.mark.plain("l2p:form=tokens,chosen=2", "moe_adapters:bottleneck=4")
def test_exports_scaling_and_merging_refuse_in_one_sentence(two_tasks, tmp_path):
    learner = two_tasks
    for format in ("lora", "transformers", "onnx", "transformers.js"):
        with pytest.raises(ValueError, match="cannot be exported: the strategy .* changes how each image is encoded"):
            export_learner(learner, tmp_path / "out", format)
    with pytest.raises(ValueError, match="cannot be scaled: the strategy"), learner.scaled(0.5):
        pass
    with pytest.raises(ValueError, match="only if nothing is trained"):
        learner.merge(copy.deepcopy(learner))
    assert not (tmp_path / "out").exists()


@pytest.mark.plain("l2p:form=tokens,chosen=2", "moe_adapters:bottleneck=4")
def test_other_backends_are_refused(two_tasks):
    learner = copy.deepcopy(two_tasks)
    learner.change_settings(replace(learner.args, backend="onnx"))
    with pytest.raises(ValueError, match="the backend 'onnx' runs the model alone.*choose the backend 'torch'"):
        learner.image_embeds([IMAGES[0][0]])


@pytest.mark.plain("l2p:form=tokens,chosen=2", "moe_adapters:bottleneck=4")
def test_encoding_is_made_again_only_if_its_tensors_change(two_tasks):
    state = copy.deepcopy(two_tasks).state
    first = state.encoding
    digest = first.digest
    assert state.encoding is first
    with torch.no_grad():
        for tensor in state.memory.values():
            tensor.add_(1)
    assert state.encoding is not first and (state.encoding.digest == digest) == (not first.tensors)


def test_hooks_act_in_their_thread_alone():
    module, other = nn.Identity(), []
    thread = threading.Thread(target=lambda: other.append(module(0)))
    with hooked((module.register_forward_hook, lambda _, given, result: result + 1)):
        inside = module(0)
        thread.start()
        thread.join()
    assert (inside, other, module(0)) == (1, [0], 0) and not module._forward_hooks
