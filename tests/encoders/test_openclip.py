"""The converter against open_clip's forward pass, written out here with PyTorch's own layers."""

import math

import pytest
import tiny_encoders as tiny
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F
from transformers import CLIPTokenizer

from dulbe_peft import load_clip
from dulbe_peft.encoders.loading import pixel_values, tokenize
from dulbe_peft.encoders.openclip import convert_open_clip, save_open_clip
from dulbe_peft.photos.commands.main import main

WIDTH, TEXT_WIDTH, FEATURES, PATCH, SIDE, LONGEST = 128, 64, 24, 4, 3, tiny.LONGEST


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A tokenizer whose end token is the last one, as CLIP's own."""
    pieces = [*tiny.LETTERS, *(f"{letter}</w>" for letter in tiny.LETTERS)]
    vocab = {piece: index for index, piece in enumerate([*pieces, "<|startoftext|>", "<|endoftext|>"])}
    folder = tmp_path_factory.mktemp("tokenizer")
    CLIPTokenizer(vocab=vocab, merges=[], model_max_length=LONGEST).save_pretrained(folder)
    return folder, len(vocab)


NAMES = {"self_attn": "attn", "linear1": "mlp.c_fc", "linear2": "mlp.c_proj", "norm1": "ln_1", "norm2": "ln_2"}


def pytorch_s(width, heads=1, act=F.gelu):
    """PyTorch's own layer, in float64: open_clip's block under other names."""
    options = {"batch_first": True, "norm_first": True, "dtype": torch.float64}
    return nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, act, **options)


def open_clip_s(name):
    part, _, rest = name.partition(".")
    return f"{NAMES[part]}.{rest}"


def random_state(vocabulary, layers=2):
    """A state dict under open_clip's names."""
    state = {}
    for tower, width in (("visual.transformer", WIDTH), ("transformer", TEXT_WIDTH)):
        shapes = {open_clip_s(name): tensor.shape for name, tensor in pytorch_s(width).state_dict().items()}
        for layer in range(layers):
            state |= {f"{tower}.resblocks.{layer}.{name}": torch.randn(shapes[name]) / 8 for name in shapes}
    state |= {
        "positional_embedding": torch.randn(LONGEST, TEXT_WIDTH),
        "text_projection": torch.randn(TEXT_WIDTH, FEATURES),
        "logit_scale": torch.tensor(math.log(70.0)),
        "token_embedding.weight": torch.randn(vocabulary, TEXT_WIDTH),
        "visual.class_embedding": torch.randn(WIDTH),
        "visual.positional_embedding": torch.randn(SIDE**2 + 1, WIDTH),
        "visual.proj": torch.randn(WIDTH, FEATURES),
        "visual.conv1.weight": torch.randn(WIDTH, 3, PATCH, PATCH) / 4,
    }
    for name, width in (("visual.ln_pre", WIDTH), ("visual.ln_post", WIDTH), ("ln_final", TEXT_WIDTH)):
        state |= {f"{name}.weight": torch.randn(width), f"{name}.bias": torch.randn(width)}
    return state


def norm(x, state, name):
    return F.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"])


def blocks(x, state, prefix, heads, mask, act):
    for index in range(2):
        layer = pytorch_s(x.shape[-1], heads, act)
        names = {name: f"{prefix}.resblocks.{index}.{open_clip_s(name)}" for name in layer.state_dict()}
        layer.load_state_dict({name: state[names[name]] for name in names})
        x = layer(x, mask)
    return x


def literal(state, pixels, texts, act=F.gelu, vision_heads=WIDTH // 64, text_heads=1):
    """open_clip's cosine logits, (images, texts), in float64; texts are padded with 0 behind the end token."""
    state = {name: tensor.double() for name, tensor in state.items()}
    x = F.conv2d(pixels.double(), state["visual.conv1.weight"], stride=PATCH)
    x = x.flatten(2).transpose(1, 2)
    first = state["visual.class_embedding"].expand(len(x), 1, -1)
    x = torch.cat([first, x], dim=1) + state["visual.positional_embedding"]
    x = blocks(norm(x, state, "visual.ln_pre"), state, "visual.transformer", vision_heads, None, act)
    images = norm(x[:, 0], state, "visual.ln_post") @ state["visual.proj"]
    length = texts.shape[1]
    mask = torch.full((length, length), -torch.inf, dtype=torch.float64).triu(1)
    y = state["token_embedding.weight"][texts] + state["positional_embedding"][:length]
    y = norm(blocks(y, state, "transformer", text_heads, mask, act), state, "ln_final")
    read = y[torch.arange(len(texts)), texts.argmax(dim=1)] @ state["text_projection"]
    return state["logit_scale"].exp() * F.normalize(images, dim=1) @ F.normalize(read, dim=1).T


def example(vocabulary):
    """Random images, and token ids of three texts of several lengths padded with 0 as open_clip does."""
    texts = torch.zeros(3, LONGEST, dtype=torch.int64)
    for row, length in zip(texts, (4, 9, LONGEST), strict=True):
        row[:length] = torch.randint(1, vocabulary - 2, (length,))
        row[0], row[length - 1] = vocabulary - 2, vocabulary - 1
    return torch.randn(2, 3, SIDE * PATCH, SIDE * PATCH), texts


@pytest.mark.parametrize(
    "facts, act",
    [
        ({}, F.gelu),
        ({"activation": "quick_gelu"}, lambda x: x * torch.sigmoid(1.702 * x)),
        ({"vision_heads": 4, "text_heads": 2}, F.gelu),
    ],
)
@torch.no_grad()
def test_both_towers_equal_open_clip_s(facts, act):
    state = random_state(50)
    pixels, texts = example(50)
    model = convert_open_clip(state, **facts)
    heads = {name: count for name, count in facts.items() if name.endswith("heads")}
    expected = literal(state, pixels, texts, act, **heads)
    found = model(input_ids=texts, pixel_values=pixels).logits_per_image
    assert (found / 70 - expected / 70).abs().max() < 1e-5
    vision, text = model.config.vision_config, model.config.text_config
    assert (vision.image_size, vision.patch_size, vision.num_hidden_layers) == (SIDE * PATCH, PATCH, 2)
    assert (text.vocab_size, text.max_position_embeddings, text.intermediate_size) == (50, LONGEST, 4 * TEXT_WIDTH)


@torch.no_grad()
def test_the_folder_loads_and_texts_are_read_at_their_end_token(tokenizer, tmp_path, capsys):
    folder, vocabulary = tokenizer
    state = random_state(vocabulary)
    # As open_clip's training writes it: half precision, data parallelism's prefix, and the epoch beside the weights.
    torch.save({"epoch": 32, "state_dict": {f"module.{n}": t.half() for n, t in state.items()}}, tmp_path / "it.pt")
    command = ["convert-openclip", str(tmp_path / "it.pt"), str(tmp_path / "out"), "--tokenizer", str(folder)]
    assert main([*command, "--resize", "squash"]) == 0
    assert "2 blocks of width 128, 2 heads" in capsys.readouterr().out
    model, processor = load_clip(tmp_path / "out")
    prompts = ["a photo of a cat.", "ox", "a bad photo of an owl."]
    tokens = tokenize(processor, prompts, model)["input_ids"]
    assert (tokens == vocabulary - 1).any(dim=1).all()
    padded = torch.zeros(3, LONGEST, dtype=torch.int64)
    for row, ids in zip(padded, processor.tokenizer(prompts)["input_ids"], strict=True):
        row[: len(ids)] = torch.tensor(ids)
    image = Image.linear_gradient("L").convert("RGB").resize((40, 20))
    pixels = pixel_values(processor, image)[None]
    squashed = pixel_values(processor, image.resize((SIDE * PATCH, SIDE * PATCH), Image.Resampling.BICUBIC))[None]
    save_open_clip(state, tmp_path / "cropping", folder)
    cropping, middle = load_clip(tmp_path / "cropping")[1], image.crop((10, 0, 30, 20))
    assert torch.allclose(pixel_values(cropping, image), pixel_values(cropping, middle), atol=0.05)
    assert pixels.shape[2:] == (SIDE * PATCH, SIDE * PATCH) and torch.allclose(pixels, squashed, atol=1e-6)
    half = {name: tensor.half().float() for name, tensor in state.items()}
    expected = literal(half, pixels, padded)
    found = model(input_ids=tokens, pixel_values=pixels).logits_per_image
    assert (found / 70 - expected / 70).abs().max() < 1e-5


def test_what_does_not_fit_or_could_hold_more_than_tensors_is_named(tokenizer, tmp_path):
    state = random_state(50)
    for name, value, message in (
        ("visual.conv1.weight", None, "'visual.conv1.weight' must be a tensor of 4 dimensions"),
        ("visual.ln_pre.bias", None, "(?s)Missing key.*vision_model.pre_layrnorm.bias"),
        ("visual.positional_embedding", state["visual.positional_embedding"][:-1], "has 9 rows"),
    ):
        changed = {key: tensor for key, tensor in (state | {name: value}).items() if tensor is not None}
        with pytest.raises(ValueError, match=message):
            convert_open_clip(changed)
    for facts, message in (
        ({"vision_heads": 3}, "vision_heads is 3, which does not divide .* 128"),
        ({"activation": "relu"}, "activation must be one of gelu, quick_gelu, got 'relu'"),
    ):
        with pytest.raises(ValueError, match=message):
            convert_open_clip(state, **facts)
    torch.save({"state_dict": {}, "folder": tmp_path}, tmp_path / "it.pt")
    with pytest.raises(ValueError, match="could not be read as tensors alone"):
        convert_open_clip(tmp_path / "it.pt")
    with pytest.raises(FileNotFoundError, match="is no file"):
        convert_open_clip(tmp_path / "absent.pt")
    with pytest.raises(ValueError, match="it is the tokenizer of another model"):
        save_open_clip(state, tmp_path / "out", tokenizer[0])
    assert [path.name for path in tmp_path.iterdir()] == ["it.pt"]
