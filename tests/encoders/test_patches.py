"""SigLIP 2 NaFlex: images of different aspect ratios in one batch, whose padding has no effect."""

import pytest
import reference
import tiny_encoders as tiny
import torch
from peft import get_peft_model
from tiny_encoders import CONFIG, QUICK, learn, pictures

from dulbe_peft import ClassIncrementalLearner, DualModeLoraConfig, LearnerArguments
from dulbe_peft.encoders.loading import image_shape, pixel_values, unit_image_embeds, unpacked
from dulbe_peft.encoders.pixels import with_image_resize
from dulbe_peft.subspaces.inputs import observed_inputs
from research.diagnostics.inspection import relevance_maps

COUNTS = [6, 4, 5, 6]  # patches of each picture


@pytest.fixture(scope="module")
def processor():
    return tiny.make_processor("siglip2")


@pytest.fixture(scope="module")
def packed(processor):
    return torch.stack([pixel_values(processor, image) for image in pictures()])


def adapted():
    torch.manual_seed(0)
    return get_peft_model(tiny.make_model("siglip2"), DualModeLoraConfig(**CONFIG, init_weights=False)).eval()


def test_unpacked_batch_equals_the_image_processors_output(processor, packed):
    expected = processor.image_processor(images=pictures(), return_tensors="pt")
    actual = unpacked(packed)
    assert packed.dtype == torch.float32 and packed.shape[1:] == image_shape(tiny.make_model("siglip2"), processor)
    assert torch.equal(actual["pixel_values"], expected["pixel_values"])
    assert torch.equal(actual["spatial_shapes"], expected["spatial_shapes"])
    assert torch.equal(actual["pixel_attention_mask"], expected["pixel_attention_mask"].bool())
    assert expected["pixel_attention_mask"].sum(dim=1).tolist() == COUNTS
    small = unpacked(packed[1:3])
    assert small["pixel_values"].shape[1] == 5 and small["pixel_attention_mask"].sum(dim=1).tolist() == [4, 5]
    small = unpacked(packed[1:2])
    assert small["pixel_values"].shape[1] == 4 and small["pixel_attention_mask"] is None


def test_features_and_gradients_of_a_batch_equal_those_of_single_images(packed):
    """Compare a masked batch with single images, cut to their patches and without a mask, in float64."""
    model = adapted().double()
    base, trained = model.get_base_model(), [p for p in model.parameters() if p.requires_grad]
    together = unit_image_embeds(base, packed)
    alone = torch.cat([unit_image_embeds(base, image[None]) for image in packed])
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=1e-5)  # unit features are float32
    directions = torch.randn(alone.shape, generator=torch.Generator().manual_seed(0))
    gradients = [torch.autograd.grad((z * directions).sum(), trained, allow_unused=True) for z in (together, alone)]
    pairs = [(a, b) for a, b in zip(*gradients) if b is not None and b.numel()]
    assert len(pairs) >= 16
    for actual, expected in pairs:
        torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-4)


def inputs_of(model, packed):
    """Return the inputs of each adapted layer for images that are encoded one by one, without padding."""
    seen: dict[str, list[torch.Tensor]] = {}
    with torch.no_grad(), observed_inputs(model.dual_mode_layers(), lambda n, x: seen.setdefault(n, []).append(x[0])):
        for image in packed:
            unit_image_embeds(model.get_base_model(), image[None])
    assert all([len(tokens) for tokens in inputs] == COUNTS for inputs in seen.values())
    return {name: torch.cat(inputs) for name, inputs in seen.items()}


def test_learner_ignores_padding_and_refuses_unreadable_or_unsuitable_input(processor, packed, tmp_path):
    ours = ClassIncrementalLearner(adapted(), tiny.make_processor("siglip2"), args=LearnerArguments(**QUICK))
    learn(ours, 0)
    for name, tokens in inputs_of(ours.model, packed).items():
        torch.testing.assert_close(ours.memory[name].double(), reference.occupation(tokens), rtol=1e-4, atol=1e-3)
    (tmp_path / "broken.png").write_bytes(b"no image")
    pictures()[0].save(tmp_path / "whole.png")
    broken, whole = ours.predictions(tmp_path)
    assert broken.error and whole.error is None and ours.predict(tmp_path / "whole.png") == whole.classes[0]
    with pytest.raises(ValueError, match="SigLIP 2 NaFlex has a different grid for each image"):
        relevance_maps(ours, pictures(), ours.text_embeds(["a0"]))
    with pytest.raises(ValueError, match="Siglip2ImageProcessorPil cannot crop"):
        with_image_resize(processor, ours.clip, "squash")
    with pytest.raises(ValueError, match=r"are \(3, 16, 16\), but the model takes \(6, 194\)"):
        ours.predict([torch.zeros(3, 16, 16)])
