"""`dulbe-peft run`: learn a class-incremental stream."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from dulbe_peft.adapter.config import DualModeLoraConfig
from dulbe_peft.arguments import LearnerArguments
from dulbe_peft.commands.settings import StreamArguments, add_flag, fields_of, pick, settings_of

if TYPE_CHECKING:  # torch is imported by the commands that need it
    from dulbe_peft.strategies import Strategy


EXAMPLE = """example:
  dulbe-peft run --model openai/clip-vit-base-patch16 --data photos --increment 10 --output out

photos holds train/CLASS/*.jpg and test/CLASS/*.jpg.
The same command goes on where a run was stopped.
"""
# What `--help` shows; `--help-all` shows the rest.
ESSENTIAL = {
    "model",
    "data",
    "output",
    "strategy",
    "classifiers",
    "increment",
    "class_order",
    "dry_run",
    "epochs",
    "learning_rate",
    "prompt_template",
    "seed",
    "num_workers",
    "device",
}


def add(commands: Any) -> None:
    usage = "dulbe-peft run --model MODEL --data DATA --output OUT [settings]"
    parser = commands.add_parser(
        "run", help="learn a class-incremental stream and write results.json", usage=usage, epilog=EXAMPLE
    )
    parser.add_argument("--config", help="YAML file with any of the settings, by their names")
    for cls, title in ((StreamArguments, "stream"), (DualModeLoraConfig, "adapter"), (LearnerArguments, "learner")):
        group = parser.add_argument_group(title)
        for field in fields_of(cls):
            action = add_flag(group, field, get_type_hints(cls)[field.name])
            if field.name not in ESSENTIAL:
                parser.rare(action)
    parser.set_defaults(call=run, resumes=True)


def run(arguments: argparse.Namespace) -> int:
    """Learn, or say what would be learned."""
    settings = settings_of(arguments)
    stream: StreamArguments = pick(StreamArguments, settings)
    config: DualModeLoraConfig = pick(DualModeLoraConfig, settings)
    args: LearnerArguments = pick(LearnerArguments, settings)
    for name in ("model",) if stream.dry_run else ("model", "data", "output"):
        if not getattr(stream, name):
            raise ValueError(f"--{name} is required")
    import torch

    from dulbe_peft.backbone import load_dual_encoder
    from dulbe_peft.distributed import leave, world
    from dulbe_peft.learner import ClassIncrementalLearner
    from dulbe_peft.report import format_summary
    from dulbe_peft.specs import split_specs
    from dulbe_peft.strategies import make_strategy

    strategy = make_strategy(stream.strategy)
    classifiers = None if stream.classifiers is None else split_specs(stream.classifiers)
    tasks = None if stream.dry_run else stream_tasks(stream)
    model: Any
    model, processor = load_dual_encoder(stream.model, stream.revision, stream.attn_implementation)
    torch.manual_seed(args.seed)
    if strategy.adapts:
        from peft import get_peft_model

        if config.target_modules is None and strategy.target_modules is not None:
            config.target_modules = sorted(strategy.target_modules)
        model = get_peft_model(model, config, revision=stream.revision)
    if tasks is None:
        print(_describe(model, strategy) if strategy.adapts else "nothing is trained, no layer is adapted")
        return 0
    learner = ClassIncrementalLearner(model, processor, args=args, strategy=strategy, classifiers=classifiers)
    results = learner.run(tasks, stream.output, resume=stream.resume)
    if world()[0] == 0:
        if "classifiers" in results:
            print(format_summary(results))
        print(f"written: {Path(stream.output) / 'results.json'}")
    leave()
    return 0


def stream_tasks(stream: StreamArguments) -> Any:
    """The tasks of the stream that the settings describe."""
    from dulbe_peft.streams.readers import load_data
    from dulbe_peft.streams.samples import dataset_class_names
    from dulbe_peft.streams.tasks import class_incremental_tasks

    train, test = (load_data(stream.data, split=split) for split in (stream.train_split, stream.test_split))
    order: Any = stream.class_order
    if order is not None and order != "icarl":
        if not Path(order).is_file():
            raise FileNotFoundError(f"class order {order!r} is neither 'icarl' nor a file")
        lines = [line.strip() for line in Path(order).read_text(encoding="utf-8").splitlines()]
        order = [line for line in lines if line]
        if not set(order) <= set(dataset_class_names(train) or ()) and all(line.isdecimal() for line in order):
            order = [int(line) for line in order]
    return class_incremental_tasks(
        train,
        test,
        increment=stream.increment,
        initial_increment=stream.initial_increment,
        class_order=order,
        seed=stream.order_seed,
    )


def _describe(model: Any, strategy: Strategy) -> str:
    """Adapted layers with their ranks, trainable parameters, and the memory of the statistics, found by one image."""
    import torch

    from dulbe_peft.backbone import image_size, unit_image_embeds
    from dulbe_peft.statistics import OccupationStatistics, collect_statistics

    config = model.active_peft_config
    clip = model.get_base_model()
    image = torch.zeros(1, 3, image_size(clip), image_size(clip))
    statistics = collect_statistics(
        model, [image], lambda _, batch: unit_image_embeds(clip, batch), into=OccupationStatistics()
    )
    lines = []
    for name, layer in model.dual_mode_layers().items():
        support = min(config.support_rank, layer.in_features - config.residual_rank)
        lines.append(
            f"{name}  {layer.in_features} -> {layer.out_features}  shared {config.shared_rank}  "
            f"residual {config.residual_rank}  support <= {support}"
        )
    bases = sum(layer.dulbe_P["default"].numel() for layer in model.dual_mode_layers().values())
    visual = sum(p.numel() for p in (*model.shared_parameters(), *model.residual_parameters()))
    visual += bases * strategy.trains_bases
    total = sum(p.numel() for p in model.parameters() if p.requires_grad) + bases * strategy.trains_bases
    lines.append(f"adapted visual layers: {len(model.dual_mode_layers())}")
    lines.append(f"trainable parameters: {total:,} ({visual:,} visual, {total - visual:,} other)")
    if strategy.remembers_inputs:
        lines.append(f"statistics: {statistics.nbytes / 2**20:.2f} MiB")
    return "\n".join(lines)
