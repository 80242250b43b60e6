"""`adapter_names`: each row of a batch has its own adapter, as with PEFT's LoRA."""

import pytest
import torch
from adapted_clip import CONFIG, learned
from peft import get_peft_model

from dulbe_peft import DualModeLoraConfig

ROWS = ["other", "__base__", "default", "other"]
PIXELS = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(5))
IDS = torch.tensor([[97, row, row + 1, 98] for row in range(4)])


@pytest.fixture(params=[None, "visual_projection"])
def model(request, tiny_clip):
    """Two adapters with histories of different lengths, of which "default" is active."""
    whole = [request.param] if request.param else None
    model = get_peft_model(tiny_clip(), DualModeLoraConfig(**CONFIG, modules_to_save=whole))
    model.add_adapter("other", DualModeLoraConfig(**CONFIG, modules_to_save=whole))
    for name, tasks in (("other", 3), ("default", 2)):
        model.set_adapter(name)
        learned(model, tasks)
    return model.eval()


@torch.no_grad()
def embeds(model, pixels=PIXELS, ids=IDS, **names):
    found = model(input_ids=ids, pixel_values=pixels, **names)
    return found.image_embeds, found.text_embeds


def one_by_one(model):
    """What each adapter alone says of all rows."""
    alone = {}
    for name in ("other", "default"):
        model.set_adapter(name)
        alone[name] = embeds(model)
    with model.disable_adapter():
        alone["__base__"] = embeds(model)
    return alone


def test_each_row_is_what_its_adapter_alone_says(model):
    alone = one_by_one(model)
    assert not torch.allclose(alone["other"][0], alone["default"][0], atol=1e-3)
    assert not torch.allclose(alone["other"][1], alone["__base__"][1], atol=1e-4)
    for tower, found in enumerate(embeds(model, adapter_names=ROWS)):
        expected = torch.stack([alone[name][tower][row] for row, name in enumerate(ROWS)])
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)
        tower = (model.get_image_features, PIXELS) if tower == 0 else (model.get_text_features, IDS)
        with torch.no_grad():
            features = tower[0](tower[1], adapter_names=ROWS).pooler_output
        torch.testing.assert_close(torch.nn.functional.normalize(features, dim=1), expected, atol=2e-6, rtol=1e-5)
    assert torch.equal(embeds(model)[0], alone["default"][0])  # and afterwards the active one again


def test_images_and_texts_have_rows_of_their_own(model):
    alone, names = one_by_one(model), {"pixel_values": ROWS, "input_ids": ["other", "default"]}
    images, texts = embeds(model, ids=IDS[:2], adapter_names=names)
    for found, rows, tower in ((images, ROWS, 0), (texts, names["input_ids"], 1)):
        expected = torch.stack([alone[name][tower][row] for row, name in enumerate(rows)])
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)


def test_what_cannot_be_served_is_refused_by_name(model):
    cases = [
        (["other"] * 3, "3 names, but a layer reads 4 rows|same as the number of inputs"),
        (
            ["other", "c", "default", "d"],
            r"adapter_names has \['c', 'd'\], the model \['default', 'other', '__base__'\]",
        ),
        ({"pixel_values": ROWS}, "mapping with the keys"),
    ]
    expected = embeds(model)[0]
    for names, words in cases:
        with pytest.raises(ValueError, match=words):
            embeds(model, adapter_names=names)
    for block in (model.previous_task, lambda: model.held_weights()):
        with block(), pytest.raises(ValueError, match="inside a block"):
            embeds(model, adapter_names=ROWS)
    with pytest.raises(ValueError, match="call eval"):
        embeds(model.train(), adapter_names=ROWS)
    model.eval().merge_adapter()
    with pytest.raises(ValueError, match="call unmerge_adapter"):
        embeds(model, adapter_names=ROWS)
    model.unmerge_adapter()
    assert torch.equal(embeds(model)[0], expected)
