"""The bridge ensemble under the classes' shared covariance, against a literal float64 reading."""

from __future__ import annotations

import reference
import torch

from dulbe_peft import BridgeEnsembleHead

DIM, SCALE, BETA, CLASSES = 6, 20.0, 0.05, 5
CENTRES = torch.randn(CLASSES, DIM, generator=torch.Generator().manual_seed(0))
TEXTS = CENTRES + 0.5 * torch.randn(CLASSES, DIM, generator=torch.Generator().manual_seed(1))
TESTS = torch.randn(20, DIM, generator=torch.Generator().manual_seed(2))


def photos(classes=range(CLASSES), each=6, seed=3):
    labels = torch.arange(len(classes)).repeat_interleave(each)
    noise = torch.randn(len(labels), DIM, generator=torch.Generator().manual_seed(seed))
    return CENTRES[list(classes)][labels] + noise * torch.linspace(0.1, 1.2, DIM), labels


def head(increment=CLASSES):
    made, (images, labels) = BridgeEnsembleHead(DIM, 4, logit_scale=SCALE, metric="whitened"), photos()
    for start in range(0, CLASSES, increment):
        stop = min(start + increment, CLASSES)
        rows = (labels >= start) & (labels < stop)
        made.add_classes([str(c) for c in range(start, stop)], images[rows], labels[rows] - start, TEXTS[:stop])
    return made


def whitener(images, labels, means):
    scatter = sum(torch.outer(z - means[c], z - means[c]) for z, c in zip(images, labels, strict=True))
    freedom = len(images) - len(means)
    pooled = scatter / freedom
    share = reference.oas(pooled, freedom)
    sigma = (1 - share) * pooled + share * pooled.trace() / DIM * torch.eye(DIM, dtype=torch.float64)
    variances, directions = torch.linalg.eigh(sigma)
    return directions @ torch.diag(variances**-0.5) @ directions.T, scatter


def test_scores_of_one_task_equal_the_reference():
    images, labels = photos()
    images, texts, tests = reference.unit(images), reference.unit(TEXTS), reference.unit(TESTS)
    means = torch.stack([images[labels == c].mean(dim=0) for c in range(CLASSES)])
    matrix, scatter = whitener(images, labels.tolist(), means)
    centre = means.mean(dim=0)
    look = [reference.unit((rows - centre) @ matrix) for rows in (images, means, tests)]
    texts = reference.unit((texts - texts.mean(dim=0)) @ matrix)
    depths = [0.0, 1 / 3, 2 / 3, 1.0]
    bridges = [[reference.slerp(v, e, depth) for depth in depths] for v, e in zip(look[1], texts, strict=True)]
    columns = []
    for c in range(CLASSES):
        own = look[0][labels == c]
        rho = []
        for k in range(4):
            each = [reference.softmax([float(SCALE * z @ row[k]) for row in bridges])[c] for z in own]
            rho.append(sum(each) / len(each) / BETA)
        weights = reference.softmax(rho)
        columns.append(SCALE * look[2] @ sum(w * b for w, b in zip(weights, bridges[c], strict=True)))
    found = head()
    torch.testing.assert_close(found.scatter, scatter, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found(TESTS).double(), torch.stack(columns, dim=1), rtol=0, atol=2e-3)


def test_the_space_is_that_of_all_images_whatever_the_tasks_and_updates():
    whole, parts, late = head(), head(increment=2), BridgeEnsembleHead(DIM, 4, logit_scale=SCALE, metric="whitened")
    images, labels = photos()
    early = torch.arange(len(labels)) % 6 < 2
    late.add_classes([str(c) for c in range(CLASSES)], images[early], labels[early], TEXTS)
    for rows in (~early).nonzero()[:, 0].split(7):
        late.update_classes(images[rows], labels[rows])
    for other in (parts, late):
        assert other.freedom == whole.freedom == len(labels) - CLASSES
        torch.testing.assert_close(other.scatter, whole.scatter, rtol=1e-5, atol=1e-6)
        # Only pi_c is of the time when a class came.
        ends = [one.bridge_prototypes()[:, [0, -1]] for one in (other, whole)]
        torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-5)


def test_with_single_images_it_is_the_centred_cosine():
    made = BridgeEnsembleHead(DIM, depths=[0.0], logit_scale=SCALE, metric="whitened")
    images, labels = photos(each=1)
    made.add_classes(list("abcde"), images, labels, TEXTS)
    images, tests = reference.unit(images), reference.unit(TESTS)
    centre = images.mean(dim=0)
    expected = SCALE * reference.unit(tests - centre) @ reference.unit(images - centre).T
    torch.testing.assert_close(made(TESTS).double(), expected, rtol=0, atol=1e-4)


def test_a_single_class_and_a_turn_of_all_features():
    made = BridgeEnsembleHead(DIM, logit_scale=SCALE, metric="whitened")
    images, labels = photos([0])
    made.add_classes(["a"], images, labels, TEXTS[:1])
    assert made(TESTS).isfinite().all()
    turned, turn = head(), torch.linalg.qr(torch.randn(DIM, DIM, generator=torch.Generator().manual_seed(5))).Q
    expected = turned(TESTS)
    turned.move(turn)
    turned.set_text_embeds(TEXTS @ turn)
    torch.testing.assert_close(turned(TESTS @ turn), expected, rtol=0, atol=1e-3)
