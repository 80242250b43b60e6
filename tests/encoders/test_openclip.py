"""Compare converted checkpoints with open_clip's forward pass, which is written out here with PyTorch's layers."""

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
    """Return a tokenizer whose end token is the last one, like CLIP's, and the size of its vocabulary."""
    pieces = [*tiny.LETTERS, *(f"{letter}</w>" for letter in tiny.LETTERS)]
    vocab = {piece: index for index, piece in enumerate([*pieces, "<|startoftext|>", "<|endoftext|>"])}
    folder = tmp_path_factory.mktemp("tokenizer")
    CLIPTokenizer(vocab=vocab, merges=[], model_max_length=LONGEST).save_pretrained(folder)
    return folder, len(vocab)


NAMES = {"self_attn": "attn", "linear1": "mlp.c_fc", "linear2": "mlp.c_proj", "norm1": "ln_1", "norm2": "ln_2"}


def pytorch_layer(width, heads=1, act=F.gelu):
    """Return PyTorch's layer in float64, which is open_clip's block under other names."""
    options = {"batch_first": True, "norm_first": True, "dtype": torch.float64}
    return nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, act, **options)


def open_clip_name(name):
    part, _, rest = name.partition(".")
    return f"{NAMES[part]}.{rest}"


def random_state(vocabulary, layers=2):
    """Return a state dict with open_clip's names."""
    state = {}
    for tower, width in (("visual.transformer", WIDTH), ("transformer", TEXT_WIDTH)):
        shapes = {open_clip_name(name): tensor.shape for name, tensor in pytorch_layer(width).state_dict().items()}
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
        layer = pytorch_layer(x.shape[-1], heads, act)
        names = {name: f"{prefix}.resblocks.{index}.{open_clip_name(name)}" for name in layer.state_dict()}
        layer.load_state_dict({name: state[names[name]] for name in names})
        x = layer(x, mask)
    return x


def literal(state, pixels, texts, act=F.gelu, vision_heads=WIDTH // 64, text_heads=1):
    """Return open_clip's cosine logits, (images, texts), in float64; texts are padded with 0 after the end token."""
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
    """Return random images, and token ids of three texts of different lengths, padded with 0 as in open_clip."""
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
def test_both_towers_equal_the_open_clip_reference(facts, act):
    state = random_state(50)
    pixels, texts = example(50)
    model = convert_open_clip(state, **facts)
    heads = {name: count for name, count in facts.items() if name.endswith("heads")}
    expected = literal(state, pixels, texts, act, **heads)
    actual = model(input_ids=texts, pixel_values=pixels).logits_per_image
    assert (actual / 70 - expected / 70).abs().max() < 1e-5
    vision, text = model.config.vision_config, model.config.text_config
    assert (vision.image_size, vision.patch_size, vision.num_hidden_layers) == (SIDE * PATCH, PATCH, 2)
    assert (text.vocab_size, text.max_position_embeddings, text.intermediate_size) == (50, LONGEST, 4 * TEXT_WIDTH)


@torch.no_grad()
def test_converted_folder_loads_and_texts_are_read_at_the_end_token(tokenizer, tmp_path, capsys):
    folder, vocabulary = tokenizer
    state = random_state(vocabulary)
    # As open_clip's training saves it: half precision, the prefix of data parallelism, the epoch beside the weights.
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
    actual = model(input_ids=tokens, pixel_values=pixels).logits_per_image
    assert (actual / 70 - expected / 70).abs().max() < 1e-5


def test_incomplete_or_unsafe_checkpoints_are_refused_by_name(tokenizer, tmp_path):
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
    with pytest.raises(ValueError, match="cannot be read as plain tensors: it holds Python objects") as error:
        convert_open_clip(tmp_path / "it.pt")
    assert "weights_only" not in str(error.value), "torch's advice would run a program that the file holds"
    with pytest.raises(FileNotFoundError, match="is not a file"):
        convert_open_clip(tmp_path / "absent.pt")
    with pytest.raises(ValueError, match="it is the tokenizer of another model"):
        save_open_clip(state, tmp_path / "out", tokenizer[0])
    assert [path.name for path in tmp_path.iterdir()] == ["it.pt"]
