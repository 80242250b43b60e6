"""Every supported encoder with tiny random weights: features, adapter, learner, saving and loading."""

import json
import shutil

import numpy as np
import pytest
import tiny_encoders as tiny
import torch
import transformers
from lives import stream
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_encoders import CONFIG, QUICK, learn, pictures
from torch.nn import functional as F

from dulbe_peft import (
    ClassIncrementalLearner,
    DualModeLoraConfig,
    LearnerArguments,
    export_lora,
    load_clip,
    load_dual_encoder,
    run_stream,
)
from dulbe_peft.encoders.loading import (
    ImageOnlyProcessor,
    embed_dim,
    encoder_of,
    has_text,
    image_shape,
    logit_scale,
    pixel_values,
    tokenize,
    unit_image_embeds,
    unit_text_embeds,
)
from dulbe_peft.encoders.registry import ENCODERS
from dulbe_peft.photos.deployment.graph import pixel_values as pixel_values_of_lines
from dulbe_peft.photos.deployment.graph import processor_steps

EVERY = [*tiny.WITH_TEXT, *tiny.IMAGE_ONLY]
PROMPTS = ["a photo of the cat.", "dog", "a digit of zero-one", "the low bird"]
NAFLEX = {"patch_size": tiny.PATCH, "max_num_patches": tiny.PATCHES}  # SigLIP 2's processor has its own defaults

ATTENTION, MLP = ["self_attn.k_proj", "self_attn.v_proj"], ["mlp.fc1", "mlp.fc2"]
VISION = {name: ("vision_model.encoder.layers", [*ATTENTION, *MLP]) for name in tiny.WITH_TEXT} | {
    "dinov2": ("encoder.layer", ["attention.k_proj", "attention.v_proj", *MLP]),
    "dinov2_with_registers": ("encoder.layer", ["attention.k_proj", "attention.v_proj", *MLP]),
    "dinov3_vit": ("model.layer", ["attention.k_proj", "attention.v_proj", "mlp.up_proj", "mlp.down_proj"]),
    "vit": ("layers", ["attention.k_proj", "attention.v_proj", *MLP]),
}
BERT = ["attention.self.key", "attention.self.value", "intermediate.dense", "output.dense"]
TEXT = {
    name: ("text_model.encoder.layers", [*ATTENTION, *MLP]) for name in ("clip", "siglip", "siglip2", "metaclip_2")
} | {
    "chinese_clip": ("text_model.encoder.layer", BERT),
    "altclip": ("text_model.roberta.encoder.layers", BERT),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return model type -> folder. "gemma" is a SigLIP 2 of fixed resolution: SigLIP with another tokenizer."""
    root = tmp_path_factory.mktemp("encoders")
    saved = {name: tiny.save_encoder(name, root / name) for name in EVERY}
    return {**saved, "gemma": tiny.save_encoder("siglip", root / "gemma", tiny.gemma_tokenizer())}


def most_slow(*names, fast):
    """Mark all families except `fast` as slow, because the others cover no further line of code."""
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]


def adapted(model_type, **fields):
    torch.manual_seed(0)
    return get_peft_model(tiny.make_model(model_type), DualModeLoraConfig(**{**CONFIG, **fields}))


def pixels(processor, images=None):
    return torch.stack([pixel_values(processor, image) for image in images or pictures()])


def paths(block, names):
    return {f"{block}.{index}.{name}" for index in range(2) for name in names}


def text_layers(model):
    names = (name.rpartition(".dulbe_text_A")[0] for name in model.state_dict() if "dulbe_text_A" in name)
    return {name.removeprefix("base_model.model.") for name in names}


def features(model, model_type):
    """Return the image features of an adapted model and, if it has a text tower, the text features."""
    base, processor = model.get_base_model(), tiny.make_processor(model_type)
    processor = processor if has_text(base) else ImageOnlyProcessor(processor)
    with torch.no_grad():
        images = unit_image_embeds(base, pixels(processor))
        return [images, unit_text_embeds(base, tokenize(processor, PROMPTS, base))] if has_text(base) else [images]


@pytest.mark.plain("clip", "gemma", "siglip2")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("siglip", {"padding": "max_length"}),
        ("gemma", {"padding": "max_length", "max_length": tiny.LONGEST}),
        ("siglip2", {"padding": "max_length", "max_length": tiny.LONGEST}),
        *((name, {"padding": True}) for name in ("clip", "metaclip_2", "chinese_clip", "altclip")),
    ],
)
def test_text_features_equal_transformers_documented_call_in_any_batch(folders, name, options):
    """Compare with the call in each family's documentation; for SigLIP 2 it lowers the case of texts first."""
    model, processor = load_dual_encoder(folders[name])
    model_type = "siglip" if name == "gemma" else name
    documented = tiny.make_processor(model_type, tiny.gemma_tokenizer() if name == "gemma" else None)
    texts = [text.lower() for text in ("A Photo of the Cat.", "Dog", "a digit of zero-one")]
    given = ["A Photo of the Cat.", "Dog", "a digit of zero-one"] if "siglip" in model_type else texts
    with torch.no_grad():
        inputs = documented(text=texts, return_tensors="pt", **options)
        output = tiny.make_model(model_type).get_text_features(**inputs)
        expected = F.normalize(output.pooler_output, dim=-1)
        actual = unit_text_embeds(model, tokenize(processor, given, model))
        with_documented = unit_text_embeds(model, tokenize(documented, texts, model))
        alone = torch.cat([unit_text_embeds(model, tokenize(processor, [prompt], model)) for prompt in PROMPTS])
        turned = unit_text_embeds(model, tokenize(processor, ["the longest of all.", *reversed(PROMPTS)], model))
        in_training = unit_text_embeds(model.train(), tokenize(processor, given, model))
    assert actual.shape == (3, embed_dim(model)) and actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(with_documented, expected, atol=1e-6, rtol=1e-5)
    assert (expected[0] - expected[1]).norm() > 0.05, "these weights do not distinguish texts"
    torch.testing.assert_close(turned[1:].flip(0), alone, atol=1e-5, rtol=1e-5)
    assert torch.equal(in_training, actual) and all(module.training for module in model.text_model.modules())
    with pytest.raises(ValueError, match=f"tokens, but the text tower takes at most {tiny.LONGEST}: shorten it"):
        tokenize(processor, ["0123456789-0123456789-0123456789"], model)
    with pytest.raises(ValueError, match="give the same tokens: rename a class"):
        tokenize(processor, ["cat", "cat"], model)
    texts = ["1" * n for n in range(1, 30)]
    longest = [text for text in texts if len(processor.tokenizer(text)["input_ids"]) <= tiny.LONGEST][-1]
    assert unit_text_embeds(model, tokenize(processor, [longest], model)).isfinite().all()


def test_loaded_siglip_processor_returns_no_mask(tmp_path):
    """The tower was trained to read padding, but a tokenizer saved without this setting returns a mask."""
    tokenizer = tiny.siglip_tokenizer()
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    model, processor = load_dual_encoder(tiny.save_encoder("siglip", tmp_path / "siglip", tokenizer))
    inputs = processor(text=PROMPTS, padding="max_length", return_tensors="pt")
    assert set(inputs) == {"input_ids"}
    assert torch.equal(inputs["input_ids"], tokenize(processor, PROMPTS, model)["input_ids"])


@pytest.mark.plain("clip", "siglip2", "altclip", "dinov3_vit")
@pytest.mark.parametrize("model_type", EVERY)
def test_image_features_equal_transformers_also_without_a_saved_image_processor(folders, tmp_path, model_type):
    model, processor = load_dual_encoder(folders[model_type])
    documented, record = tiny.make_processor(model_type), ENCODERS[model_type]
    assert type(model).__name__ == record.model
    assert not any("pooler" in name for name in model.state_dict()), "many checkpoints have a pooler of random weights"
    with torch.no_grad():
        inputs = documented(images=pictures(), return_tensors="pt", **(NAFLEX if record.patches else {}))
        reference = tiny.make_model(model_type)
        if record.image_only:
            expected = reference(**inputs).last_hidden_state[:, 0]
        else:
            expected = reference.get_image_features(**inputs).pooler_output
        actual = unit_image_embeds(model, pixels(processor))
    assert actual.shape == (4, embed_dim(model))
    if has_text(model):
        model.logit_scale.data.fill_(3.0)
    assert logit_scale(model) == pytest.approx(np.exp(3.0) if has_text(model) else 1.0)
    assert pixels(processor).shape[1:] == image_shape(model, processor)
    assert image_shape(model) == ((4, 3 * tiny.PATCH**2 + 2) if record.patches else (3, 16, 16))
    torch.testing.assert_close(actual, F.normalize(expected, dim=-1), atol=1e-6, rtol=1e-5)
    if "dino" in model_type:
        with torch.no_grad():
            torch.testing.assert_close(expected, reference(**inputs).pooler_output)
    shutil.copytree(folders[model_type], tmp_path / "bare", ignore=shutil.ignore_patterns("*processor_config.json"))
    model, processor = load_dual_encoder(tmp_path / "bare")
    assert type(processor.image_processor).__name__ == record.image_processor
    assert pixels(processor).shape == (4, *image_shape(model))


def test_image_processor_decides_the_size_if_a_model_takes_any(tmp_path):
    tiny.save_encoder("dinov2", tmp_path)
    square = {"height": 24, "width": 24}
    transformers.BitImageProcessorPil(size={"shortest_edge": 24}, crop_size=square).save_pretrained(tmp_path)
    model, processor = load_dual_encoder(tmp_path)
    assert image_shape(model) == (3, 16, 16) and image_shape(model, processor) == (3, 24, 24)
    assert unit_image_embeds(model, pixels(processor)).shape == (4, 32)


def test_unsupported_model_types_are_refused_by_name(folders, tmp_path):
    for model_type, why in (
        ("of_nobody", ""),
        ("timm_wrapper", r" \(timm needs torchvision"),
        ("dinov3_convnext", r" \(it has no class token"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        with pytest.raises(ValueError, match=f"of type '{model_type}', which is not supported{why}") as caught:
            load_dual_encoder(tmp_path)
        assert all(f"'{name}'" in str(caught.value) for name in ENCODERS)
    with pytest.raises(ValueError, match="contains a SiglipModel, expected a CLIPModel.*load_dual_encoder"):
        load_clip(folders["siglip"])
    with pytest.raises(FileNotFoundError, match=r"\./nowhere"):
        load_dual_encoder("./nowhere")


def test_learner_refuses_incomplete_models_and_processors():
    model, processor = adapted("siglip"), tiny.make_processor("siglip")
    images_alone, config = ImageOnlyProcessor(processor.image_processor), DualModeLoraConfig(**CONFIG)
    classifier = get_peft_model(transformers.Dinov2ForImageClassification(tiny.make_config("dinov2")), config)
    no_text = "has no text tower, but texts are needed here: use a model of type 'clip', 'siglip'"
    for given, beside, settings, error, words in (
        (adapted("dinov2"), images_alone, {}, ValueError, no_text),
        (model, images_alone, {}, TypeError, "(?s)must be a SiglipProcessor or similar.*without tokenizer"),
        (model, processor, {"statistics_tokens": "cls"}, ValueError, "'cls', but a SiglipModel has no class token"),
        (classifier, processor, {}, ValueError, "not the complete DINOv2 encoder: pass a Dinov2Model"),
    ):
        with pytest.raises(error, match=words):
            ClassIncrementalLearner(given, beside, args=LearnerArguments(**QUICK, **settings))


@pytest.mark.plain("clip", "siglip2", "vit")
@pytest.mark.parametrize("model_type", EVERY)
def test_default_targets_are_keys_values_and_mlp_of_the_blocks(model_type):
    block, names = VISION[model_type]
    attention, output = ("attention", "o_proj") if model_type in tiny.IMAGE_ONLY else ("self_attn", "out_proj")
    expected = paths(block, [*names, f"{attention}.q_proj", f"{attention}.{output}"])
    assert set(adapted(model_type, target_modules="all-linear").dual_mode_layers()) == expected
    model = adapted(model_type)
    assert set(model.dual_mode_layers()) == paths(block, names)
    assert text_layers(model) == (paths(*TEXT[model_type]) if model_type in TEXT else set())
    trained = ("dulbe_shared_B", "dulbe_residual_B", "dulbe_text_A", "dulbe_text_B")
    assert all(p.requires_grad == any(name in key for name in trained) for key, p in model.named_parameters())
    with model.disable_adapter():
        plain = features(model, model_type)
    assert all(map(torch.equal, features(model, model_type), plain)), "an untrained adapter changes nothing"


def test_gated_mlp_of_dinov2_giant_is_adapted():
    config = tiny.make_config("dinov2")
    config.use_swiglu_ffn = True
    model = get_peft_model(transformers.Dinov2Model(config), DualModeLoraConfig(**CONFIG))
    names = ["attention.k_proj", "attention.v_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    assert set(model.dual_mode_layers()) == paths("encoder.layer", names)


def test_target_lists_match_vision_blocks_only_and_expressions_match_all_layers():
    model = adapted("clip", target_modules=["k_proj"], layers_to_transform=[1])
    assert set(model.dual_mode_layers()) == {"vision_model.encoder.layers.1.self_attn.k_proj"}
    assert text_layers(model) == paths(*TEXT["clip"])
    listed = adapted("siglip", target_modules=["fc1", "out_proj"])  # the pooling head has layers of these names
    assert set(listed.dual_mode_layers()) == paths("vision_model.encoder.layers", ["mlp.fc1", "self_attn.out_proj"])
    head = "vision_model.head.mlp.fc1"
    assert set(adapted("siglip", target_modules=r".*head\.mlp\.fc1").dual_mode_layers()) == {head}


@pytest.mark.plain("clip", "siglip", "vit")
@pytest.mark.parametrize("model_type", EVERY)
def test_adapter_is_saved_loaded_and_exported_as_plain_lora(model_type, tmp_path):
    model = adapted(model_type, init_weights=False)
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    loaded = PeftModel.from_pretrained(tiny.make_model(model_type), tmp_path / "adapter")
    plain = features(adapted(model_type), model_type)
    for actual, expected, before in zip(features(loaded, model_type), features(model, model_type), plain):
        assert torch.equal(actual, expected) and not torch.allclose(expected, before, atol=1e-3)
    model.fold_task()
    export_lora(model, tmp_path / "lora")
    stock = PeftModel.from_pretrained(tiny.make_model(model_type), tmp_path / "lora")
    assert isinstance(stock.active_peft_config, LoraConfig)
    torch.testing.assert_close(features(stock, model_type), features(model, model_type), atol=1e-5, rtol=1e-4)


@pytest.mark.rare("clip", "siglip", "metaclip_2", "altclip", "gemma")
@pytest.mark.plain("siglip2")
@pytest.mark.parametrize("name", most_slow(*tiny.WITH_TEXT, "gemma", fast=("siglip2", "chinese_clip")))
def test_saved_learner_loads_its_model_and_processor_and_learns_on(folders, name, tmp_path):
    torch.manual_seed(0)
    model, processor = load_dual_encoder(folders[name])
    model = get_peft_model(model, DualModeLoraConfig(**CONFIG))
    learner = ClassIncrementalLearner(model, processor, LearnerArguments(**QUICK), classifiers="pooled_bridge")
    before = {key: value.clone() for key, value in learner.model.state_dict().items() if "text_B" in key}
    learn(learner, 0)
    after = learner.model.state_dict()
    assert before and all(not torch.equal(after[key], value) for key, value in before.items())
    learner.save_pretrained(tmp_path / "learner")
    loaded = ClassIncrementalLearner.from_pretrained(tmp_path / "learner", args=learner.args)
    assert type(loaded.clip) is type(learner.clip)
    assert type(loaded.processor).__name__ == encoder_of(loaded.clip).processor
    assert type(loaded.processor.image_processor) is type(learner.processor.image_processor)
    assert loaded.predict(pictures()) == learner.predict(pictures())
    for each in (learner, loaded):
        learn(each, 1)
    images = [(image, 0) for image in pictures(seed=9)]
    assert torch.equal(loaded.image_embeds(images), learner.image_embeds(images))
    title = "CLIP" if name == "clip" else encoder_of(loaded.clip).title
    card = (tmp_path / "learner/README.md").read_text(encoding="utf-8")
    assert f"This {title} model learned 2 classes" in card and f"import {type(loaded.clip).__name__}\n" in card


@pytest.mark.rare("dinov2_with_registers", "dinov3_vit", "vit")
@pytest.mark.parametrize("model_type", most_slow(*tiny.IMAGE_ONLY, fast=("dinov2",)))
def test_image_only_encoder_learns_without_text(folders, tmp_path, model_type):
    """A learner that trains nothing needs no text: it learns, runs, saves and loads without a text tower."""
    model, processor = load_dual_encoder(folders[model_type])
    args = LearnerArguments(device="cpu", progress=False)
    with pytest.raises(ValueError, match="'text' needs text"):
        ClassIncrementalLearner(model, processor, args=args, strategy="frozen", classifiers=("prototype", "text"))
    learner = ClassIncrementalLearner(model, processor, args=args, strategy="frozen")
    assert learner.classifiers and not any(classifier.needs_text for classifier in learner.classifiers.values())
    learner = ClassIncrementalLearner(model, processor, args=args, strategy="frozen", classifiers="prototype")
    results = run_stream(learner, stream(2), tmp_path / "run").contents()
    assert "zero_shot" not in results and "text" not in results and "prototype" in results["classifiers"]
    again = ClassIncrementalLearner.from_pretrained(tmp_path / "run" / "task-002")
    assert again.predict(pictures()) == learner.predict(pictures())
    assert isinstance(again.processor, ImageOnlyProcessor)


@pytest.mark.parametrize("model_type", tiny.OF_ONE_SIZE)
def test_pixels_in_pillow_and_numpy_equal_the_image_processor(model_type):
    processor = type("Processor", (), {"image_processor": tiny.make_image_processor(model_type)})()
    steps = json.loads(json.dumps(processor_steps(processor)))
    for photo in [*pictures(), *(picture.resize((301, 77)) for picture in pictures())]:
        values = processor.image_processor(images=[photo], return_tensors="np")["pixel_values"][0]
        np.testing.assert_allclose(pixel_values_of_lines(photo, steps), values, atol=1e-5)


def test_unusual_image_processor_is_not_replaced_by_pillow_and_numpy():
    for name, value in (("do_normalize", False), ("do_resize", False), ("size", {"longest_edge": 16})):
        image_processor = tiny.make_image_processor("siglip")
        setattr(image_processor, name, value)
        assert processor_steps(type("Processor", (), {"image_processor": image_processor})()) is None


def test_image_processor_with_slightly_other_pixels_is_not_replaced():
    """Without the bound of 1e-5, a difference of 5e-5 would go unnoticed into every image of an export."""

    class Other:
        def __init__(self, shift):
            self.shift, self.given = shift, tiny.make_image_processor("siglip")

        def to_dict(self):
            return self.given.to_dict()

        def __call__(self, **images):
            return {"pixel_values": [rows + self.shift for rows in self.given(**images)["pixel_values"]]}

    found = [processor_steps(type("Processor", (), {"image_processor": Other(shift)})()) for shift in (0.0, 5e-5)]
    assert found[0] is not None and found[1] is None
