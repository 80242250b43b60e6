"""Train a CLIP on one task after another in a loop of your own.

`--resume` learns the next task in a new process. The five steps are those of `docs/method.md`. The data
are the package's handwritten digits, and the model is its tiny CLIP. Yours are any data sets of
{"image", "label"} items and "openai/clip-vit-base-patch16".
"""

import sys

import torch
from peft import PeftModel, get_peft_model
from torch.nn.functional import normalize
from torch.utils.data import DataLoader

from dulbe_peft import (
    DualModeLoraConfig,
    OccupationStatistics,
    bidirectional_kl,
    collect_statistics,
    cross_modal_loss,
    load_clip,
    probe_gradients,
    route_gradients,
)
from dulbe_peft.classifiers import PooledBridgeHead
from dulbe_peft.streams.digits import digit_tasks


def preprocess(samples):
    images = [sample["image"] for sample in samples]
    pixels = processor.image_processor(images=images, return_tensors="pt")["pixel_values"]
    return pixels, torch.tensor([sample["label"] for sample in samples])


def image_embeds(pixels):
    return normalize(clip.get_image_features(pixel_values=pixels).pooler_output, dim=-1)


def tokenize(names):
    prompts = [f"a photo of a {name}." for name in names]
    return processor.tokenizer(prompts, padding=True, return_tensors="pt")


def text_embeds(tokens):
    return normalize(clip.get_text_features(**tokens).pooler_output, dim=-1)


def learn(dataset, names, epochs=2):
    in_order = DataLoader(dataset, 32, collate_fn=preprocess)
    shuffled = DataLoader(dataset, 32, shuffle=True, collate_fn=preprocess)
    tokens = tokenize(names)
    with torch.no_grad():  # the texts as they are before the task, once
        text = text_embeds(tokens)
        old_text = text_embeds(tokenize(head.class_names)) if head.class_names else None

    # 1. probe: the gradient of the new task, without a step
    def task_loss(_, batch):
        pixels, labels = batch
        return cross_modal_loss(image_embeds(pixels), text, labels, tau), len(labels)

    probe = probe_gradients(model, in_order, task_loss)
    # 2. allocate: where each layer may write; the ranks are the configuration's
    model.begin_task(probe, statistics)

    # 3. train: the task's loss reaches all that is trained, the structure loss the shared modes alone
    optimizer = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(shuffled))
    model.train()
    for _ in range(epochs):
        for pixels, labels in shuffled:
            z = image_embeds(pixels)
            structure_loss = None
            if old_text is not None:
                with torch.no_grad(), model.previous_task():
                    teacher = image_embeds(pixels)
                structure_loss = bidirectional_kl(tau * z @ old_text.T, tau * teacher @ old_text.T)
            text = text_embeds(tokens)  # moves, as the text LoRA is trained; with text_rank=0 it stays
            route_gradients(model, cross_modal_loss(z, text, labels, tau), structure_loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

    # 4. fold the modes into the history, 5. close: the layers' inputs, and the head
    model.eval()
    model.fold_task()
    features = []

    def encode(_, batch):
        features.append(image_embeds(batch[0]))

    collect_statistics(model, in_order, encode, into=statistics)
    with torch.no_grad():
        texts = torch.cat([text_embeds(tokenize(group)) for group in (head.class_names, names) if group])
    labels = torch.cat([labels for _, labels in in_order])
    head.add_classes(list(names), torch.cat(features), labels, texts)


@torch.no_grad()
def accuracy(dataset, names):
    right = 0
    for pixels, labels in DataLoader(dataset, 64, collate_fn=preprocess):
        answers = head(image_embeds(pixels)).argmax(dim=1).tolist()
        right += sum(head.class_names[i] == names[label] for i, label in zip(answers, labels.tolist()))
    return right / len(dataset)


def save(folder):
    model.save_pretrained(folder)
    statistics.save(f"{folder}/statistics.safetensors")
    head.save_pretrained(folder)


if __name__ == "__main__":
    june, july, august = digit_tasks()[:3]
    clip, processor = load_clip("demo")
    tau = clip.logit_scale.exp().item()
    if "--resume" in sys.argv:
        model = PeftModel.from_pretrained(clip, "by-hand", is_trainable=True)
        statistics = OccupationStatistics.load("by-hand/statistics.safetensors")
        head = PooledBridgeHead.from_pretrained("by-hand")
        tasks = [august]
    else:
        model = get_peft_model(clip, DualModeLoraConfig(residual_rank=4, support_rank=16))
        statistics = OccupationStatistics()
        head = PooledBridgeHead(clip.config.projection_dim, logit_scale=tau)
        tasks = [june, july]
    for task in tasks:
        learn(task.train, task.class_names)
        first, now = accuracy(june.test, june.class_names), accuracy(task.test, task.class_names)
        print(f"{', '.join(june.class_names)}: {first:.1%}; {', '.join(task.class_names)}: {now:.1%}")
    save("by-hand")
