"""Compare the central formula of each method with numbers that its authors' own function gives.

`authors/numbers.json` has the numbers, and the repository, commit and function that gave them. The functions were
called once, in float64, on the inputs that `drawn` makes here; the file has none of their code. A literal version that
is written from our own description of a method repeats a misreading, and these numbers do not.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import CLIPVisionConfig
from transformers.models.clip.modeling_clip import CLIPEncoderLayer

from dulbe_peft.classifiers.ranpac import random_layer
from dulbe_peft.classifiers.registry import make_classifier
from dulbe_peft.papers.adapters import beside_mlps, bottleneck
from dulbe_peft.papers.cl_lora import WEIGHTS, ClLora, row_scales
from dulbe_peft.papers.clg_cbm import bottleneck_loss
from dulbe_peft.papers.coda_prompt import CodaPrompt
from dulbe_peft.papers.dualprompt import DualPrompt
from dulbe_peft.papers.inflora import InfLora
from dulbe_peft.papers.knowledge_injection import contrast
from dulbe_peft.papers.l2p import L2P
from dulbe_peft.papers.magmax import larger
from dulbe_peft.papers.moe_adapters import gates, mixture
from dulbe_peft.papers.o_lora import OLora
from dulbe_peft.papers.projection_memory import Subspace, gpm, top_directions
from dulbe_peft.papers.proof import fusion_tensors, projected_fusion
from dulbe_peft.papers.rapf import fused, hard_pairs, push_apart
from dulbe_peft.papers.sd_lora import directions, scaled
from dulbe_peft.papers.slca import normed, shrunk
from dulbe_peft.papers.spu import Spu
from dulbe_peft.strategies.losses import bidirectional_kl
from research.benchmarks.rivals import proker, tip_adapter
from research.verification.measuring import gda_clip

NUMBERS = json.loads((Path(__file__).parent / "authors" / "numbers.json").read_text(encoding="utf-8"))


def drawn(seed, *shape):
    """Return standard normal numbers in float64, which every version of NumPy draws."""
    return torch.from_numpy(np.random.RandomState(seed).standard_normal(shape))


def unit(seed, *shape):
    return F.normalize(drawn(seed, *shape), dim=-1)


def numbers(row, name):
    return torch.tensor(NUMBERS[row]["values"][name], dtype=torch.float64)


def close(actual, row, name, tolerance=1e-12):
    """Compare with the stored numbers, within a share of the largest one."""
    actual, expected = torch.as_tensor(actual).double(), numbers(row, name)
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max()


# ---------------------------------------------------------------------- networks beside the MLP


def block(activation, epsilon):
    """Return a block of CLIP with 8 numbers for each token."""
    config = CLIPVisionConfig(hidden_size=8, intermediate_size=16, num_attention_heads=2, hidden_act=activation)
    config.layer_norm_eps, config._attn_implementation = epsilon, "sdpa"  # "eager" has a softmax in float32
    made = CLIPEncoderLayer(config).double()
    for number, (name, tensor) in enumerate(sorted(made.named_parameters())):
        tensor.data = 0.5 * drawn(100 + number, *tensor.shape) + ("norm" in name and name.endswith("weight"))
    return made


def through(made, x, update):
    with torch.no_grad(), beside_mlps([(made, made.layer_norm2)], lambda _, tokens: update(tokens)):
        out = made(x, attention_mask=None)
    return out[0] if isinstance(out, tuple) else out


def test_block_with_an_adapter_of_aper():
    network = drawn(1, 3, 8), drawn(2, 8, 3), drawn(3, 3), drawn(4, 8)
    out = through(block("gelu", 1e-6), drawn(0, 3, 5, 8), lambda x: 0.1 * bottleneck(x, *network))
    close(out, "aper", "out")


def test_block_with_experts():
    router, networks = drawn(5, 8, 3), (drawn(6, 3, 3, 8), drawn(7, 3, 8, 3), drawn(8, 3, 3), drawn(9, 3, 8))

    def update(x):
        return 0.1 * mixture(x, gates(x[:, 0] @ router, 2), *networks)

    close(through(block("quick_gelu", 1e-5), drawn(0, 4, 5, 8), update), "moe_adapters", "out")


# ---------------------------------------------------------------------- prompts


def test_prompt_and_penalty_of_coda_prompt():
    queries, tables = drawn(10, 4, 6), {"keys": drawn(11, 1, 5, 6), "attention": drawn(12, 1, 5, 6)}
    tables["prompts"] = drawn(13, 1, 5, 8, 7)
    strategy = CodaPrompt(orthogonal=1.0)
    keys, values = strategy.prefixes(tables, queries, None)[0]
    close(keys, "coda_prompt", "keys")
    close(values, "coda_prompt", "values_")
    close(strategy.term(tables, queries, 0), "coda_prompt", "penalty")


def test_prefixes_and_tokens_of_l2p():
    pool = {"keys": drawn(15, 1, 8, 6), "pool": drawn(16, 1, 8, 4, 7)}
    keys, values = L2P(chosen=3).prefixes(pool, drawn(14, 4, 6), None)[0]
    close(keys, "l2p prefix", "keys")
    close(values, "l2p prefix", "values_")
    strategy, queries = L2P(form="tokens", chosen=2), drawn(17, 4, 6)
    pool = {"keys": drawn(18, 1, 7, 6), "pool": drawn(19, 1, 7, 3, 5)}
    close(strategy.selected(pool, queries, 0).flatten(1, 2), "l2p tokens", "prompt")
    close(-strategy.term(pool, queries, 0), "l2p tokens", "reduce_sim")


def test_expert_prompts_of_dualprompt():
    """The authors' pool is (blocks, keys and values, prompts, length, heads, depth)."""
    queries, pool = drawn(20, 4, 6), drawn(22, 2, 2, 3, 5, 2, 4)
    tensors = {"experts": pool.permute(2, 0, 1, 3, 4, 5).flatten(4), "keys": drawn(21, 3, 6)}
    tensors["general"] = torch.zeros(1, 2, 5, 8, dtype=torch.float64)
    strategy = DualPrompt()
    for task, name in ((2, "train"), (None, "test")):
        pairs = strategy.prefixes(tensors, queries, task)
        actual = torch.stack([torch.stack(pairs[block]) for block in (1, 2)])  # blocks, keys and values, images, ...
        close(actual.unflatten(4, (2, 4)), "dualprompt", name)
    close(-strategy.term(tensors, queries, 2), "dualprompt", "reduce_sim")


# ---------------------------------------------------------------------- weights


def test_merged_change_of_magmax():
    changes = [drawn(seed, 4, 5) for seed in (23, 24, 25)]
    changes[2][0] = -changes[0][0]  # ties: the later one counts
    close(larger(larger(changes[0], changes[1]), changes[2]), "magmax", "merged")


def test_update_of_sd_lora():
    x, down, up = drawn(26, 3, 6), drawn(27, 3, 2, 6), drawn(28, 3, 6, 2)
    old_down, old_up = torch.cat(list(down[:2].mT), dim=1), torch.cat(list(up[:2]), dim=1)
    old, _ = directions(old_down, old_up, rank=2)
    magnitudes = torch.tensor([0.7, 0.9, 0.8], dtype=torch.float64)
    all_up = scaled(torch.cat([old, up[2]], dim=1), magnitudes)
    close(x @ torch.cat([old_down, down[2].T], dim=1) @ all_up.T, "sd_lora", "update")


def test_bases_and_memory_of_inflora_over_four_tasks():
    strategy, memory = InfLora(tasks=10), Subspace(torch.zeros(8, 0))
    for index in range(4):
        shares = torch.tensor([3.0, 2.0, 1.5, 1.0, 0.6, 0.4, 0.3, 0.2], dtype=torch.float64).roll(2 * index)
        inputs = drawn(29 + index, 30, 8) * shares
        moment = inputs.T @ inputs / 30
        basis = top_directions(memory, moment @ moment, 2, "inputs")
        expected = numbers("inflora", "bases")[index]
        assert (basis @ basis.T / 3 - expected).abs().max() < 1e-10
        share = strategy.threshold(SimpleNamespace(index=index, planned=None))
        memory = gpm(memory, moment @ moment, share, "inputs", dual=True, one_less=index == 0)
        free = memory.free_basis()
        assert (free @ free.T - numbers("inflora", "free")[index]).abs().max() < 1e-10


def test_directions_of_keeplora():
    gradient, occupied = drawn(34, 8, 8), torch.linalg.qr(drawn(35, 8, 3)).Q
    basis = top_directions(Subspace(occupied), gradient.T @ gradient, 2, "gradient")
    close(basis @ basis.T, "keeplora", "projection", 1e-9)


def test_penalty_of_o_lora():
    layers = {
        str(i): SimpleNamespace(
            dulbe_history_P={"default": drawn(68 + i, 4, 6).T}, dulbe_P={"default": drawn(70 + i, 2, 6).T}
        )
        for i in range(2)
    }
    task = SimpleNamespace(index=1, adapter_name="default", layers=layers)
    close(OLora(lambda_1=1.0).penalty(task), "o_lora", "loss")


def test_penalty_and_row_scales_of_cl_lora():
    task = SimpleNamespace(memory={WEIGHTS: drawn(38, 3, 4)}, notes={WEIGHTS: drawn(39, 4)})
    close(ClLora(similarity=1.0).penalty(task), "cl_lora", "loss", 1e-7)  # theirs adds 1e-8 to each norm
    close(row_scales(drawn(40, 6, 2)).flatten(), "cl_lora", "weights")


def test_weights_that_spu_chooses():
    layer = SimpleNamespace(in_features=6, out_features=5)
    task = SimpleNamespace(layers={"fc1": layer}, gradients={"fc1": drawn(72, 5, 6)}, notes={})
    Spu(share=0.1).plan(task)
    close(torch.zeros(30).scatter(0, task.notes["fc1"], 1.0).view(5, 6), "spu", "mask")


def test_gradient_of_zscl_s_distillation():
    """The authors' loss is a cross-entropy, which differs from the divergence by a constant."""
    student, teacher = drawn(36, 5, 4).requires_grad_(), drawn(37, 5, 4)
    bidirectional_kl(3 * student, 3 * teacher, 2.0, 2.0).backward()
    close(student.grad, "zscl", "gradient")


# ---------------------------------------------------------------------- classifiers of papers


def test_fusion_and_hard_pairs_of_rapf():
    close(fused(0.4 * drawn(41, 6, 6), 0.4 * drawn(42, 6, 6), 0.6), "rapf", "fused")
    texts = unit(43, 7, 6)
    texts[5] = F.normalize(texts[0] + 0.2 * texts[5], dim=0)
    texts[6] = F.normalize(texts[2] + 0.25 * texts[6], dim=0)
    pairs = hard_pairs(texts, 4, 0.55)
    assert pairs.tolist() == NUMBERS["rapf"]["values"]["hard_pairs"] and len(pairs) >= 2
    both = pairs.repeat_interleave(2, dim=0)
    close(push_apart(unit(44, len(both), 6), texts, both), "rapf", "hinge")


def test_scores_and_means_of_slca_s_alignment():
    task = torch.tensor([0, 0, 0, 1, 1, 2, 2])
    close(normed(drawn(45, 5, 7), task) / 0.1, "slca", "decoupled", 1e-6)  # theirs adds 1e-7 to each norm
    close(shrunk(drawn(46, 7, 4), task), "slca", "means", 1e-7)  # the factors are in float32


def test_attention_of_proof():
    image_map, image_shift, text_map, text_shift = (
        drawn(seed, 2, *shape).sum(dim=0) for seed, shape in ((47, (6, 6)), (48, (6,)), (49, (6, 6)), (50, (6,)))
    )
    weights = {"image_map": image_map, "image_shift": image_shift, "text_map": text_map, "text_shift": text_shift}
    weights |= {"query": 0.5 * drawn(51, 6, 6), "key": 0.5 * drawn(52, 6, 6)}
    weights |= {"value": drawn(53, 6, 6), "out": drawn(54, 6, 6)}
    weights["out_shift"] = drawn(55, 6)
    tensors = fusion_tensors(unit(57, 4, 6), unit(58, 4, 6), drawn(59, 6, 6), 1.0, weights)
    close(projected_fusion(unit(56, 3, 6), **tensors, sums=False), "proof", "cosines", 1e-6)


def test_losses_of_clg_cbm():
    features, concepts, layer, weight = unit(60, 6, 5), unit(61, 4, 5), drawn(62, 4, 5), drawn(63, 3, 4)
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    ours = bottleneck_loss(features, labels, concepts, layer, weight, 1.0)
    rest = F.cross_entropy(features @ layer.T @ weight.T, labels)
    theirs = numbers("clg_cbm", "similarity") + numbers("clg_cbm", "sparse")
    assert float(ours - rest) == pytest.approx(float(theirs), rel=1e-12)


def test_contrast_and_discriminant_of_engine():
    close(contrast(unit(64, 4, 6), unit(65, 4, 6)), "engine", "contrast")
    images, labels = unit(66, 12, 6), torch.arange(12) % 3
    classifier = make_classifier("engine:epochs=1,discriminant=1.0", 6, 1.0)
    classifier.add_classes(["a", "b", "c"], images.float(), labels, unit(64, 3, 6).float())
    close(classifier.logits(unit(67, 5, 6).float()), "engine", "discriminant", 1e-5)


# ---------------------------------------------------------------------- classifiers

IMAGES, LABELS, TEXTS, TESTS = unit(73, 20, 6), torch.arange(20) % 4, unit(74, 4, 6), unit(75, 7, 6)


def logits(spec, scale=1.0):
    classifier = make_classifier(spec, 6, scale)
    classifier.add_classes(list("abcd"), IMAGES.float(), LABELS, TEXTS.float())
    return classifier.logits(TESTS.float()).double(), classifier


@pytest.mark.parametrize(
    ("row", "spec"),
    [("ranpac", "ranpac:features=50,ridge=5"), ("ridge", "ridge:ridge=0.3"), ("prototype", "prototype")],
)
def test_scores_of_a_classifier(row, spec):
    """The features are rounded to float32, and the matrix that is inverted has a condition number below 1,000."""
    assert random_layer(0, 6, 50).shape == (6, 50)
    close(logits(spec)[0], row, "logits", 1e-4)


def test_scores_of_gda_clip():
    """The classifier divides its scores by alpha if that is larger than 1, and leaves out a number for each image."""
    actual, classifier = logits(gda_clip(0.5, 20, 4, 6), 100.0)
    actual, expected = actual * max(1, float(classifier.alpha)), numbers("gda", "logits")
    actual, expected = (scores - scores.mean(dim=1, keepdim=True) for scores in (actual, expected))
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_scores_of_lda_order_classes_as_the_distance_of_klda():
    """-(mu - z)' S^+ (mu - z) is twice z' S^-1 mu - mu' S^-1 mu / 2, up to a number for each image; S is a sum."""
    actual, _ = logits("lda:shrinkage=1e-9,prior_images=0")
    actual, expected = 2 * actual / (20 - 4), numbers("lda", "logits")
    actual, expected = (scores - scores.mean(dim=1, keepdim=True) for scores in (actual, expected))
    assert (actual - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_scores_of_classifiers_that_keep_all_features():
    close(tip_adapter(IMAGES, LABELS, TEXTS, 100.0, TESTS, 1.17, 5.5), "tip_adapter", "logits")
    ours = proker(IMAGES, LABELS, TEXTS, 1.0, TESTS, 3.0, 0.2)
    # Their function solves (K / lambda + I), which is lambda times the minimiser that their paper derives.
    close(TESTS @ TEXTS.T + 0.2 * (ours - TESTS @ TEXTS.T), "proker", "logits")


def test_every_row_names_its_source_and_is_used():
    source = Path(__file__).read_text(encoding="utf-8")
    for row, entry in NUMBERS.items():
        assert entry["repository"].count("/") == 1 and len(entry["commit"]) == 40 and ".py: " in entry["function"]
        assert f'"{row}"' in source and entry["values"]
    assert len({row.split()[0] for row in NUMBERS}) >= 20
