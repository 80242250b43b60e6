"""Tiny encoders of every supported type with random weights, and their processors, with tokenizers built in code."""

import string
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from copies import copies
from PIL import Image
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from dulbe_peft.encoders.registry import ENCODERS

IMAGE_SIZE, PATCH = 16, 8
LONGEST = 24
TOWER = {"intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
VISION = {**TOWER, "hidden_size": 32, "image_size": IMAGE_SIZE, "patch_size": PATCH}
TEXT = {**TOWER, "hidden_size": 24, "vocab_size": 128, "max_position_embeddings": LONGEST}
LETTERS = string.ascii_letters + string.digits + ".,-"
WORDS = ("photo", "of", "the", "digit", "cat")
WITH_TEXT = [name for name, record in ENCODERS.items() if not record.image_only]
IMAGE_ONLY = [name for name, record in ENCODERS.items() if record.image_only]
OF_ONE_SIZE = [name for name, record in ENCODERS.items() if not record.patches]
PATCHES = 6  # the most patches that the image processor makes; the model has 2 x 2 positions


def _ids(tokens: list[str]) -> dict[str, int]:
    return {token: index for index, token in enumerate(tokens)}


def clip_tokenizer() -> Any:
    """Return CLIP's byte-pair tokenizer. As in the published ones, the end token is also the padding token."""
    pieces = [*LETTERS, *(f"{letter}</w>" for letter in LETTERS)][:120]
    vocab = _ids(["<|startoftext|>", "<|endoftext|>", *pieces])
    return transformers.CLIPTokenizer(vocab=vocab, merges=[], model_max_length=LONGEST)


def xlm_roberta_tokenizer() -> Any:
    pieces = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    pieces += [(f"▁{word}", -1.0) for word in WORDS] + [(letter, -3.0) for letter in "▁" + LETTERS]
    return transformers.XLMRobertaTokenizer(vocab=[*pieces, ("<mask>", 0.0)], model_max_length=LONGEST)


def bert_tokenizer() -> Any:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    letters = string.ascii_lowercase + string.digits + ".,-"
    vocab = _ids([*tokens, *letters, *(f"##{letter}" for letter in letters)])
    return transformers.BertTokenizer(vocab=vocab, model_max_length=LONGEST)


def siglip_tokenizer() -> Any:
    """Return a tokenizer like SigLIP's: lower-case word pieces, an end token, and no attention mask."""
    letters = string.ascii_lowercase + string.digits + ".,-"
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)] + [(f"▁{word}", -1.0) for word in WORDS]
    backend = Tokenizer(models.Unigram(pieces + [(letter, -3.0) for letter in "▁" + letters], unk_id=2))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, model_max_length=LONGEST, model_input_names=["input_ids"], **special
    )


def gemma_tokenizer() -> Any:
    """Return a tokenizer like SigLIP 2's, which keeps the case although the model was trained on lower case."""
    vocab = _ids(["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "▁", *LETTERS])
    options: dict[str, Any] = {"add_bos_token": False, "add_eos_token": True, "padding_side": "right"}
    return transformers.GemmaTokenizer(
        vocab=vocab, merges=[], model_max_length=LONGEST, model_input_names=["input_ids"], **options
    )


TOKENIZERS = {
    "clip": clip_tokenizer,
    "siglip": siglip_tokenizer,
    "siglip2": gemma_tokenizer,
    "metaclip_2": xlm_roberta_tokenizer,
    "chinese_clip": bert_tokenizer,
    "altclip": xlm_roberta_tokenizer,
}


def make_config(model_type: str) -> Any:
    record = ENCODERS[model_type]
    config = getattr(transformers, record.model.removesuffix("Model") + "Config")
    if record.image_only:
        return config(**VISION, mlp_ratio=1) if "dinov2" in model_type else config(**VISION)
    special = {
        "clip": {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1},
        "siglip": {"projection_size": 32, "pad_token_id": 0},
        "siglip2": {"projection_size": 32, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1},
        "metaclip_2": {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1},
        "chinese_clip": {"pad_token_id": 0},
        # Position ids start after the id of the padding token.
        "altclip": {"pad_token_id": 1, "max_position_embeddings": LONGEST + 2, "project_dim": 20},
    }
    widths = {} if "siglip" in model_type else {"projection_dim": 16}
    vision = VISION
    if record.patches:
        vision = {**TOWER, "hidden_size": 32, "patch_size": PATCH, "num_patches": (IMAGE_SIZE // PATCH) ** 2}
    return config(vision_config=vision, text_config={**TEXT, **special[model_type]}, **widths)


def make_model(model_type: str) -> Any:
    """Return a new copy of the same random model every time."""
    return _models(model_type)()


@cache
def _models(model_type: str) -> Any:
    """Return copies of a random model, with weights large enough for features to depend on every token."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, ENCODERS[model_type].model)(make_config(model_type)).eval()
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.data.normal_(std=0.2)
            elif name.endswith("lambda1"):
                parameter.data.fill_(0.5)
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
                module.weight.data[module.padding_idx] = 0  # training never changes it from zero
    return copies(model)


def make_image_processor(model_type: str) -> Any:
    square = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    kind = getattr(transformers, ENCODERS[model_type].image_processor)
    if ENCODERS[model_type].patches:
        return kind(patch_size=PATCH, max_num_patches=PATCHES)
    if model_type in ("siglip", "vit", "dinov3_vit"):
        return kind(size=square)
    return kind(size={"shortest_edge": IMAGE_SIZE}, crop_size=square)


def make_processor(model_type: str, tokenizer: Any = None) -> Any:
    """Return the processor of the model family, or only the image processor for an image-only encoder."""
    record, image_processor = ENCODERS[model_type], make_image_processor(model_type)
    if record.processor is None:
        return image_processor
    tokenizer = tokenizer or TOKENIZERS[model_type]()
    return getattr(transformers, record.processor)(image_processor=image_processor, tokenizer=tokenizer)


def save_encoder(model_type: str, folder: Path, tokenizer: Any = None) -> Path:
    """Save a model and its processor as on the Hub, and return the folder."""
    make_model(model_type).save_pretrained(folder)
    make_processor(model_type, tokenizer).save_pretrained(folder)
    return folder


QUICK = {"epochs": 1, "batch_size": 4, "learning_rate": 1e-3, "device": "cpu", "progress": False}
QUICK |= {"prompt_template": "the digit {}."}

CONFIG = {"residual_rank": 2, "support_rank": 4}


def pictures(seed=0):
    generator, sides = np.random.default_rng(seed), ((20, 26), (16, 16), (90, 21), (33, 34))
    return [Image.fromarray(generator.integers(0, 255, (*side, 3), np.uint8)) for side in sides]


def learn(learner, index):
    rows = [(image, place % 2) for place, image in enumerate(pictures(seed=index))]
    learner.learn_task(rows, [f"a{index}", f"b{index}"])
