"""The key of an encoder's features changes with its weights, however they were changed."""

import torch
from peft import LoraConfig, get_peft_model
from small_runs import learner_of

from dulbe_peft.data.readers import load_data
from dulbe_peft.data.store import FeatureStore


def stored_encoder(base, folder_of_digits, folder):
    """Return an encoder without an adapter that has its own store, some images, and their features."""
    encoder = learner_of(base, "frozen", ("text",)).encoder
    encoder.store = FeatureStore(folder / "store.sqlite")
    images = encoder.images(load_data(folder_of_digits, "train"))
    return encoder, images, encoder.dataset_embeds(images)


def test_images_are_encoded_again_after_weights_change_through_data(base, digit_folders, tmp_path):
    encoder, images, before = stored_encoder(base, digit_folders(2, 4, 1), tmp_path)
    facts, key = encoder.facts, encoder.key
    weight = encoder.clip.vision_model.encoder.layers[0].mlp.fc1.weight
    version = weight._version
    weight.data.mul_(1.5)
    assert weight._version == version, "PyTorch counts this write now, so the test shows nothing"
    assert encoder.facts["weights"] != facts["weights"]
    assert encoder.key != key
    changed = encoder.dataset_embeds(images)
    assert (changed - before).abs().max() > 1e-3
    weight.data.div_(1.5)
    assert torch.allclose(encoder.dataset_embeds(images), before, atol=1e-5)


def test_peft_merge_and_unload_changes_the_key(base, digit_folders, tmp_path):
    encoder, images, before = stored_encoder(base, digit_folders(2, 4, 1), tmp_path)
    key = encoder.key
    config = LoraConfig(r=2, target_modules=["fc1"], init_lora_weights=False)
    merged = get_peft_model(encoder.clip, config).merge_and_unload()
    assert merged is encoder.clip
    assert encoder.key != key
    assert (encoder.dataset_embeds(images) - before).abs().max() > 1e-3


def test_facts_of_unchanged_weights_are_equal(base, digit_folders, tmp_path):
    encoder, images, before = stored_encoder(base, digit_folders(2, 4, 1), tmp_path)
    facts = encoder.facts
    assert torch.equal(encoder.dataset_embeds(images), before)
    assert encoder.facts == facts
