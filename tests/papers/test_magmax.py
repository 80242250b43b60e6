"""Test MagMax: the largest change of each weight, against a literal version, and training from the last weights."""

import copy

import pytest
import torch
from lives import images_of, learned, tiny_base, tiny_learner
from peft import PeftModel

from dulbe_peft import export_lora
from dulbe_peft.papers.magmax import larger


def literal(changes):
    """Return for each weight the change with the largest magnitude, and the latest of equal ones."""
    kept = torch.zeros_like(changes[0])
    for row in range(kept.shape[0]):
        for column in range(kept.shape[1]):
            for change in changes:
                if abs(change[row, column]) >= abs(kept[row, column]):
                    kept[row, column] = change[row, column]
    return kept


def test_running_maximum_equals_a_literal_version():
    changes = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    changes[2, 0], changes[3, 1] = -changes[1, 0], -changes[0, 1]  # ties
    running = changes[0]
    for change in changes[1:]:
        running = larger(running, change)
        assert torch.equal(larger(running, change), running) or (running.abs() == change.abs()).any()
    assert torch.equal(running, literal(changes)) and torch.equal(larger(running, running), running)
    assert (running.abs() >= changes.abs()).all()
    free = changes.clone()
    free[2, 0], free[3, 1] = 0.3, -0.7  # without ties, the order of the tasks makes no difference
    assert torch.equal(literal(free), literal(free.flip(0)))


@pytest.mark.plain("0.5")
@pytest.mark.parametrize("scale", [0.5, 0.25])
def test_model_has_the_scaled_maximum_and_training_goes_on_from_the_last_weights(scale, tmp_path):
    learner = tiny_learner(f"magmax:scale={scale}", ("text",), learning_rate=1e-3, epochs=2)
    text, changes = learner.text_embeds(["a"]), []
    for index in range(3):
        learned(learner, 1, index)
        changes.append({name: tensor.clone() for name, tensor in learner.memory.items()})
    for name, layer in learner.model.dual_mode_layers().items():
        expected = scale * literal([change[name] for change in changes])
        actual = layer.get_delta_weight("default")
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)
        # Two epochs of Adam move a weight by at most 2 steps of 1e-3 from the last task's, not from the maximum.
        assert (changes[2][name] - changes[1][name]).abs().max() <= 2.1e-3 and expected.abs().max() > 5e-4 * scale
    assert torch.equal(learner.text_embeds(["a"]), text)  # names stay as they are
    learner.save_pretrained(tmp_path / "saved")
    images = images_of(0, 1, seed=3)
    loaded = type(learner).from_pretrained(tmp_path / "saved", copy.deepcopy(tiny_base()[0]))
    assert torch.equal(loaded.image_embeds(images), learner.image_embeds(images))
    for each in (learner, loaded):
        learned(each, 1, 3)
    assert torch.equal(loaded.image_embeds(images), learner.image_embeds(images))
    export_lora(learner.model, tmp_path / "lora")
    stock = PeftModel.from_pretrained(copy.deepcopy(tiny_base()[0]), tmp_path / "lora").eval()
    with torch.no_grad():
        z = stock.get_image_features(torch.stack([pixels for pixels, _ in images])).pooler_output
    torch.testing.assert_close(
        torch.nn.functional.normalize(z, dim=1), learner.image_embeds(images), rtol=1e-4, atol=1e-5
    )
