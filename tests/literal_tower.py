"""CLIP's vision tower written out in float64 for one image, with prompts or networks beside the MLPs."""

import torch
from torch.nn import functional as F
from transformers.activations import ACT2FN


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def literal_tower(clip, pixels, prefixes, tokens=None, pooled=False, beside=None, whole=True):
    """Return the unit feature of one image, (3, h, w), by CLIP's tower in float64, with the prompts of this image.

    `beside(block, x)` is added to the output of each block; x are the tokens before the norm that its MLP reads.
    Without `whole`, return what the projection reads, and the class token after each block, instead.
    """
    weights = {name: tensor.double() for name, tensor in clip.state_dict().items()}
    config = clip.config.vision_config

    def linear(x, name):
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", torch.zeros(()))

    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], config.layer_norm_eps)

    patches = F.conv2d(
        pixels[None].double(),
        weights["vision_model.embeddings.patch_embedding.weight"],
        stride=config.patch_size,
    )
    x = torch.cat([weights["vision_model.embeddings.class_embedding"][None], patches[0].flatten(1).T])
    x = x + weights["vision_model.embeddings.position_embedding.weight"]
    if tokens is not None:
        x = torch.cat([x[:1], tokens, x[1:]])
    x = norm(x, "vision_model.pre_layrnorm")
    after = []
    heads, depth = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    for block in range(config.num_hidden_layers):
        at = f"vision_model.encoder.layers.{block}"
        y = norm(x, f"{at}.layer_norm1")
        q, k, v = (linear(y, f"{at}.self_attn.{name}_proj") for name in "qkv")
        if block in prefixes:
            k, v = torch.cat([prefixes[block][0], k]), torch.cat([prefixes[block][1], v])
        parts = []
        for head in range(heads):
            columns = slice(head * depth, (head + 1) * depth)
            scores = (q[:, columns] @ k[:, columns].T / depth**0.5).softmax(dim=1)
            parts.append(scores @ v[:, columns])
        x = x + linear(torch.cat(parts, dim=1), f"{at}.self_attn.out_proj")
        y, network = norm(x, f"{at}.layer_norm2"), 0.0 if beside is None else beside(block, x)
        x = x + linear(ACT2FN[config.hidden_act](linear(y, f"{at}.mlp.fc1")), f"{at}.mlp.fc2") + network
        after.append(x[0])
    outputs = x[1 : 1 + len(tokens)] if pooled else x[:1]
    pooled_output = norm(outputs, "vision_model.post_layernorm").mean(dim=0)
    if not whole:
        return pooled_output, after
    return F.normalize(pooled_output @ weights["visual_projection.weight"].T, dim=0)
