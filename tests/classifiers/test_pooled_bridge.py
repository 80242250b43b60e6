"""Compare the bridge ensemble with shared weights to literal loops and to the paper's head, with a modality gap."""

import math
import warnings

import pytest
import reference
import torch
from reference import randn
from taught import in_tasks
from torch.nn import functional as F

from dulbe_peft.classifiers import make_classifier
from dulbe_peft.classifiers.bridge import BridgeEnsembleHead
from dulbe_peft.classifiers.pooled_bridge import PooledBridgeHead

DIM, SCALE, CLASSES = 8, 20.0, 5
DEPTHS = [0.0, 1 / 3, 2 / 3, 1.0]
CENTRES, TESTS = randn(CLASSES, DIM, seed=100), randn(20, DIM, seed=9)
TEXTS = CENTRES + 0.8 * randn(CLASSES, DIM, seed=1)


def photos(classes, each, seed, spread=0.7):
    labels = torch.tensor(classes).repeat_interleave(each)
    return CENTRES[labels] + spread * randn(len(labels), DIM, seed=seed), labels


def make_head(**settings):
    """Return a head that has learned three classes with six images, one with five, and one with a single image."""
    head = PooledBridgeHead(DIM, **{"num_depths": 4, "logit_scale": SCALE, **settings})
    head.add_classes(["ant", "bee", "cat"], *photos([0, 1, 2], 6, 2), TEXTS[:3])
    images, labels = photos([3, 4], 5, 3)
    head.add_classes(["dog", "eel"], images[:6], labels[:6] - 3, TEXTS)
    return head


def make_reference():
    literal = reference.PooledHead(DEPTHS, logit_scale=SCALE)
    literal.learn(
        *(part if torch.is_floating_point(part) else part.tolist() for part in photos([0, 1, 2], 6, 2)), TEXTS[:3]
    )
    images, labels = photos([3, 4], 5, 3)
    literal.learn(images[:6], labels[:6].tolist(), TEXTS)
    return literal


def assert_same(head, literal):
    expected = [sum(sum(row) for row in told) for told in literal.told]
    torch.testing.assert_close(head.confidence.sum(dim=1), torch.tensor(expected).double(), rtol=0, atol=1e-4)
    assert head.left_out_counts.tolist() == [len(told) for told in literal.told]
    torch.testing.assert_close(head.depth_weights, torch.tensor(literal.pooled_weights()).double(), rtol=0, atol=1e-4)
    torch.testing.assert_close(head(TESTS).double(), literal.logits(TESTS), rtol=0, atol=5e-3)


def test_head_equals_the_reference_over_two_tasks_and_an_update():
    head, literal = make_head(), make_reference()
    assert head.left_out_counts.tolist() == [6, 6, 6, 5, 0]
    assert_same(head, literal)
    images, labels = photos([1, 4], 3, 7)
    head.update_classes(images, labels)
    literal.learn(images, labels.tolist(), TEXTS)
    assert_same(head, literal)


@pytest.mark.parametrize(("each", "named"), [(1, 0.0), (1, 3.0), (3, 0.3)])
def test_head_with_few_images_equals_the_reference(each, named):
    texts = CENTRES + named * randn(CLASSES, DIM, seed=1)
    images, labels = photos(range(CLASSES), each, 4)
    head, literal = PooledBridgeHead(DIM, 4, logit_scale=SCALE), reference.PooledHead(DEPTHS, logit_scale=SCALE)
    head.add_classes(list("abcde"), images, labels, texts)
    literal.learn(images, labels.tolist(), texts)
    assert_same(head, literal)


def test_left_out_scores_use_prototypes_without_the_image():
    head, (images, labels) = make_head(), photos([0, 1, 2], 6, 2)
    images = reference.unit(images)
    actual = head.left_out(images.float(), labels)
    for row, (image, own) in enumerate(zip(images, labels.tolist(), strict=True)):
        rest = images[(labels == own) & (torch.arange(18) != row)].mean(dim=0)
        u = rest / images[labels == own].mean(dim=0).norm()
        text = reference.unit(TEXTS)[own]
        theta = math.acos(float(F.normalize(u, dim=0) @ text))
        points = [(math.sin((1 - a) * theta) * u + math.sin(a * theta) * text) / math.sin(theta) for a in DEPTHS]
        expected = SCALE * sum(w * float(p @ image) for w, p in zip(head.depth_weights.tolist(), points, strict=True))
        assert actual[row, own].item() == pytest.approx(expected, abs=1e-3)
        others = torch.arange(5) != own
        torch.testing.assert_close(actual[row, others], head(image[None].float())[0, others], rtol=0, atol=1e-4)


def test_reliability_with_two_images_per_class_is_not_biased_by_prototype_length():
    """v_c of one image is further from every image than v_c of two. The length of v_c must correct for this."""
    gap = 2 * randn(1, 64, seed=3)
    centres, labels = randn(40, 64, seed=4), torch.arange(40).repeat_interleave(2)
    images = gap + centres[labels] + randn(80, 64, seed=5)
    head = PooledBridgeHead(64, depths=[0.0], logit_scale=100.0)
    head.add_classes([str(c) for c in range(40)], images, labels, randn(40, 64, seed=6))
    told = head.confidence.sum() / head.left_out_counts.sum()
    units = F.normalize(images, dim=1)
    partners = units.view(40, 2, 64).flip(1).reshape(80, 64)  # each left-out class is its other image, at length 1
    scores = (100 * units @ head.visual_prototypes.T).scatter(
        1, labels[:, None], 100 * (units * partners).sum(dim=1, keepdim=True)
    )
    at_length_one = scores.softmax(dim=1).gather(1, labels[:, None]).mean()
    # The reliability must predict the probabilities of further images of the classes.
    further = F.normalize(gap + centres[labels] + randn(80, 64, seed=8), dim=1)
    expected = head(further).softmax(dim=1).gather(1, labels[:, None]).mean()
    assert abs(told - expected) < 0.1 < expected - at_length_one


def test_pooled_head_approaches_the_papers_head_for_similar_classes_with_many_images():
    classes, width = 5, 10
    first = torch.eye(width)[0]
    texts = torch.stack([torch.roll(first + 0.9 * torch.eye(width)[3], 2 * c) for c in range(classes)])
    tests, errors = randn(30, width, seed=2), []
    for each in (100, 2000):
        cloud = first + 0.12 * randn(each, width, seed=1)
        images = torch.cat([torch.roll(cloud, 2 * c, dims=1) for c in range(classes)])
        labels = torch.arange(classes).repeat_interleave(each)
        paper, pooled = (kind(width, 4, logit_scale=10.0) for kind in (BridgeEnsembleHead, PooledBridgeHead))
        for head in (paper, pooled):
            head.add_classes(list("abcde"), images, labels, texts)
        assert paper.reliability.std(dim=0).max() < 1e-5, "all classes have the same weights"
        assert 0.1 < paper.reliability.amax() < 0.9, "more than one depth counts"
        errors.append((paper.reliability - pooled.reliability).abs().max().item())
        torch.testing.assert_close(paper(tests), pooled(tests), rtol=0, atol=60 / each)
    assert errors[1] < errors[0] / 5, "leaving one image out changes less the more there are"


def apart(each, classes=24, dim=64, own=0.5, seed=0):
    """Return images and texts with a modality gap, as in CLIP. Every other class has a weak text."""
    shift, text_shift, centres = (
        randn(*shape, seed=seed + n) for n, shape in enumerate([(1, dim), (1, dim), (classes, dim)])
    )
    labels = torch.arange(classes).repeat_interleave(each)
    images = 1.5 * shift + centres[labels] + own * randn(len(labels), dim, seed=seed + 3)
    strength = torch.where(torch.arange(classes) % 2 == 0, 1.0, 0.1)[:, None]
    texts = 2 * text_shift + strength * centres + 0.3 * randn(classes, dim, seed=seed + 4)
    further = 1.5 * shift + centres.repeat_interleave(10, 0) + own * randn(10 * classes, dim, seed=seed + 5)
    return images, labels, texts, further, torch.arange(classes).repeat_interleave(10)


def test_papers_head_warns_across_a_modality_gap_and_the_pooled_head_works():
    images, labels, texts, further, truth = apart(8, own=1.5)
    names = [str(c) for c in range(24)]
    paper, pooled = BridgeEnsembleHead(64), PooledBridgeHead(64)
    with pytest.warns(UserWarning, match=r"^\d+ of 24 classes can hardly be predicted: .* 'pooled_bridge'") as caught:
        paper.add_classes(names, images, labels, texts)
        paper.update_classes(images, labels)
    assert len(caught) == 1 and int(caught[0].message.args[0].split()[0]) == paper.outvoted() > 2
    pooled.add_classes(names, images, labels, texts)
    right = [(head(further).argmax(dim=1) == truth).double().mean().item() for head in (paper, pooled)]
    assert right[1] > right[0] + 0.1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = paper.fork()
        assert again.outvoted() == paper.outvoted()
    with pytest.warns(UserWarning, match="can hardly be predicted"):
        other = BridgeEnsembleHead(64)
        other.add_classes(names, images, labels, texts)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.fork().update_classes(images[:1], labels[:1])  # warns only once


@pytest.mark.filterwarnings("ignore:.* classes can hardly be predicted")
def test_outvoted_classes_are_counted_by_images_half_way_to_the_mean():
    images, labels, texts, _, _ = apart(8, own=1.5)
    head = BridgeEnsembleHead(64)
    head.add_classes([str(c) for c in range(24)], images, labels, texts)
    means, bridges, weights = (
        t.double() for t in (head.visual_prototypes, head.bridge_prototypes(), head.reliability)
    )

    def count(typical):
        found = 0
        for c in range(24):
            own, pooled = [], []
            for other in range(24):
                scores = [float(typical[c] @ bridges[other, depth]) for depth in range(bridges.shape[1])]
                own.append(sum(float(weights[other, depth]) * score for depth, score in enumerate(scores)))
                pooled.append(sum(float(weights[:, depth].mean()) * score for depth, score in enumerate(scores)))
            found += own.index(max(own)) != c == pooled.index(max(pooled))
        return found

    middle = means.mean(dim=0)
    assert head.outvoted() == count([(mean + middle) / 2 for mean in means]) != count(means)


def test_papers_head_does_not_warn_without_a_modality_gap():
    images, labels, texts, _, _ = apart(8, own=1.5)
    images, texts = images - images.mean(dim=0), texts - texts.mean(dim=0)
    head = BridgeEnsembleHead(64)
    head.add_classes([str(c) for c in range(24)], images, labels, texts)
    assert head.outvoted() == 0


def test_depth_with_one_image_follows_the_quality_of_the_texts():
    images, labels, texts, _, _ = apart(1)
    centres = images - images.mean(dim=0)
    depths = {}
    for name, given in (
        ("strong", 3 * centres),
        ("weak", centres + 4 * randn(24, 64, seed=8)),
        ("none", randn(24, 64, seed=9)),
    ):
        head = PooledBridgeHead(64)
        head.add_classes([str(c) for c in range(24)], images, labels, given + texts.mean(dim=0))
        depths[name] = head.expected_depth()[0].item()
    assert depths["strong"] > 0.85 > depths["weak"] > 0.3 > depths["none"]


def test_single_classes_and_extreme_texts_give_finite_weights():
    for text in (CENTRES[:1], -CENTRES[:1]):
        head = PooledBridgeHead(DIM)
        head.add_classes(["a"], CENTRES[:1], [0], text)
        assert head(TESTS).isfinite().all() and head.depth_weights.sum().item() == pytest.approx(1)
    head = PooledBridgeHead(DIM, logit_scale=1e4, reliability_temperature=1e-300)
    head.add_classes(
        ["a", "b"], CENTRES[[0, 0, 1, 1]], [0, 0, 1, 1], -CENTRES[:2]
    )  # with an image left out, u and e are opposite
    assert head.depth_weights.isfinite().all() and head(TESTS).isfinite().all()


def test_merged_heads_equal_one_head_in_prototypes_and_add_their_confidence():
    images, labels = photos(range(CLASSES), 6, 5)
    texts = reference.unit(TEXTS).float()
    one, two = (in_tasks("pooled_bridge", images[rows], labels[rows], texts) for rows in (labels >= 0, labels < 3))
    early, late = torch.arange(30) % 6 < 2, torch.arange(30) % 6 >= 2
    parts = [in_tasks("pooled_bridge", images[rows], labels[rows], texts) for rows in (early, late)]
    sums = parts[0].confidence + parts[1].confidence
    actual = parts[0].merge(parts[1])
    torch.testing.assert_close(actual.visual_prototypes, one.visual_prototypes, rtol=0, atol=1e-6)
    torch.testing.assert_close(actual.lengths, one.lengths, rtol=1e-6, atol=0)
    assert torch.equal(actual.counts, one.counts) and torch.equal(actual.confidence, sums)
    two.join_classes("class 2", "class 1")
    assert two.class_names == ["class 0", "class 1"] and two.counts.tolist() == [6, 12]
    total = reference.unit(images)[(labels == 1) | (labels == 2)].sum(dim=0)
    torch.testing.assert_close(two.visual_prototypes[1].double(), total / total.norm(), rtol=0, atol=1e-6)
    other = PooledBridgeHead(DIM, depths=[0.0, 0.5], logit_scale=20.0)
    with pytest.raises(ValueError, match="to merge need the same (num_depths|depths)"):
        one.merge(other)


def test_forgetting_renaming_and_moving_keep_the_confidence_of_other_classes():
    head, turn = make_head(), torch.linalg.qr(randn(DIM, DIM, seed=5)).Q
    sums = head.confidence.clone()
    head.forget_class("bee")
    assert torch.equal(head.confidence, sums[[0, 2, 3, 4]])
    head.rename_class("cat", "lynx", TEXTS[1])
    torch.testing.assert_close(head.text_embeds[1].double(), reference.unit(TEXTS)[1], rtol=0, atol=1e-6)
    before = head.depth_weights
    head.move(turn)
    assert torch.equal(head.depth_weights, before)
    images, labels = photos([3], 4, 6)
    head.update_classes(images @ turn, labels - 1)
    total = (reference.unit(torch.cat([photos([3, 4], 5, 3)[0][:5], images])) @ turn.double()).sum(dim=0)
    torch.testing.assert_close(head.visual_prototypes[2].double(), total / total.norm(), rtol=0, atol=1e-6)


def test_export_has_no_bias_and_a_saved_head_gives_the_same_scores(tmp_path):
    head = make_head()
    function, tensors = head.formula()
    units = F.normalize(TESTS, dim=1)
    torch.testing.assert_close(function(units, **tensors), head(TESTS), rtol=0, atol=1e-4)
    assert tensors["bias"].abs().max() == 0
    head.save_pretrained(tmp_path)
    again = PooledBridgeHead.from_pretrained(tmp_path)
    assert torch.equal(again(TESTS), head(TESTS)) and again.calibration == head.calibration
    assert PooledBridgeHead.file_names() == ("pooled_bridge_config.json", "pooled_bridge.safetensors")


def test_views_change_only_the_prototypes():
    images, labels = photos([0, 1, 2], 6, 2)
    views = F.normalize(images[:, None] + 0.1 * randn(18, 3, DIM, seed=4), dim=2)
    plain, viewed = (make_classifier("pooled_bridge", DIM, SCALE) for _ in range(2))
    plain.add_classes(["ant", "bee", "cat"], images, labels, TEXTS[:3])
    viewed.add_classes(["ant", "bee", "cat"], images, labels, TEXTS[:3], views=views)
    assert torch.equal(viewed.confidence, plain.confidence) and torch.equal(viewed.counts, plain.counts)
    expected = F.normalize(views.view(3, 18, DIM).double().sum(dim=1), dim=1)
    torch.testing.assert_close(viewed.visual_prototypes.double(), expected, rtol=0, atol=1e-6)
