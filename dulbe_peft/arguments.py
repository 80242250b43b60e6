"""The learner's settings. The help text of each stands once, here; the command line and the docs read it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from dulbe_peft.utils.checks import check_int, check_number

# Settings of the machine: they do not travel with a saved learner, and a run may be resumed with others.
MACHINE_SETTINGS = (
    "device",
    "eval_batch_size",
    "log_with",
    "num_workers",
    "pixel_cache_mb",
    "profile",
    "progress",
    "torch_compile",
)


@dataclass(frozen=True)
class LearnerArguments:
    """Settings of [`ClassIncrementalLearner`]; the defaults are the paper's.

    Raises:
        ValueError: a value is out of its range; the message names the field.
        TypeError: a value is of another type.

    Reference:
        "Implementation Details"; where the paper is silent, `docs/decisions.md`.
    """

    epochs: int = field(default=2, metadata={"help": "Passes over a task's images."})
    batch_size: int = field(default=32, metadata={"help": "Images per training step."})
    eval_batch_size: int = field(default=64, metadata={"help": "Images per batch where nothing is trained."})
    learning_rate: float = field(default=1e-3, metadata={"help": "Adam's learning rate at the start of each task."})
    lr_schedule: str = field(
        default="step",
        metadata={
            "help": "Cosine to 0 at every step, or at every epoch to a floor of 0.01 of the rate.",
            "choices": ("step", "epoch"),
        },
    )
    structure_weight: float = field(default=0.5, metadata={"help": "lambda, the weight of the structure loss."})
    class_temperature: float = field(default=5.0, metadata={"help": "tau_C, softmax over the old classes."})
    instance_temperature: float = field(default=0.1, metadata={"help": "tau_I, softmax over the batch's images."})
    kl_reduction: str = field(
        default="mean",
        metadata={
            "help": "Mean over images and over old classes, or both sums divided by the batch size.",
            "choices": ("mean", "batchmean"),
        },
    )
    teacher: str = field(
        default="cached",
        metadata={
            "help": "Teacher features from the probe pass, or computed at every step (for augmented data).",
            "choices": ("cached", "online"),
        },
    )
    statistics_tokens: str = field(
        default="all",
        metadata={"help": "Which tokens enter the input statistics.", "choices": ("all", "cls", "patch")},
    )
    statistics: str = field(
        default="exact",
        metadata={
            "help": "Input statistics in full, or an approximation: after each task, matrices wider than 2 K_h are "
            "cut to their 2 K_h leading directions. A bound on what is lost is tracked.",
            "choices": ("exact", "sketch"),
        },
    )
    prompt_template: str | tuple[str, ...] = field(
        default="a photo of a {}.",
        metadata={
            "help": "Prompt; {} takes the class name. Of several (a list, a text file with one a line, or one flag "
            "each), classifiers take the mean of the unit text embeddings.",
            "repeated": True,
        },
    )
    training_template: str | None = field(
        default=None, metadata={"help": "Prompt that training uses. None: prompt_template, of several the first."}
    )
    class_name_style: str = field(
        default="verbatim",
        metadata={"help": "Class names as they are, or underscores as spaces.", "choices": ("verbatim", "spaces")},
    )
    image_resize: str = field(
        default="processor",
        metadata={
            "help": "How an image gets the model's size: as the model's processor does it, by the short side and a "
            "centre crop, or the whole image as a square.",
            "choices": ("processor", "crop", "squash"),
        },
    )
    text_embeds: str = field(
        default="current",
        metadata={
            "help": "Encode all seen classes anew after each task, or keep each as it was when its class arrived.",
            "choices": ("current", "at_introduction"),
        },
    )
    drift: str = field(
        default="none",
        metadata={
            "help": "When a task closes: leave what classifiers store as it is, or move it along with the features by "
            "a linear map.",
            "choices": ("none", "linear"),
        },
    )
    num_depths: int = field(default=10, metadata={"help": "K_b, bridge depths from 0 (visual) to 1 (text)."})
    reliability_temperature: float = field(default=0.05, metadata={"help": "beta, softmax over bridge depths."})
    seed: int = field(default=0, metadata={"help": "Seed of the initial weights and of the order of images."})
    num_workers: int = field(default=0, metadata={"help": "Processes that read images; 0 reads in the main process."})
    pixel_cache_mb: int = field(
        default=1024,
        metadata={"help": "Keep a task's preprocessed images in memory up to so many MiB; 0: read every pass."},
    )
    device: str = field(default="auto", metadata={"help": "auto, cpu, or an accelerator's type such as cuda."})
    mixed_precision: str = field(
        default="no", metadata={"help": "Autocast in training and inference.", "choices": ("no", "bf16")}
    )
    torch_compile: bool = field(
        default=False, metadata={"help": "Compile the image tower with torch.compile; needs a C++ compiler."}
    )
    profile: bool = field(default=False, metadata={"help": "Print where the time of each task went."})
    log_with: str | None = field(
        default=None, metadata={"help": "Tracker known to accelerate, such as tensorboard; needs its package."}
    )
    progress: bool = field(default=True, metadata={"help": "Show progress bars."})

    def portable(self) -> dict[str, Any]:
        """The settings without the machine's: what a saved learner, its model card and a run's identity hold."""
        return {name: value for name, value in asdict(self).items() if name not in MACHINE_SETTINGS}

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "eval_batch_size"):
            object.__setattr__(self, name, check_int(name, getattr(self, name), 1))
        object.__setattr__(self, "num_workers", check_int("num_workers", self.num_workers, 0, 1000))
        object.__setattr__(self, "pixel_cache_mb", check_int("pixel_cache_mb", self.pixel_cache_mb, 0))
        object.__setattr__(self, "seed", check_int("seed", self.seed, 0, 2**63 - 1))
        object.__setattr__(self, "num_depths", check_int("num_depths", self.num_depths, 2, 1000))
        # What is larger makes weights or losses infinite, which would only be seen after a task was trained.
        check_number("learning_rate", self.learning_rate, positive=True, most=1e4)
        for name in ("class_temperature", "instance_temperature"):
            check_number(name, getattr(self, name), positive=True, most=1e6)
        check_number("reliability_temperature", self.reliability_temperature, positive=True, most=1e6, tiny=True)
        check_number("structure_weight", self.structure_weight, least=0, most=1e6)
        for f in self.__dataclass_fields__.values():
            choices = f.metadata.get("choices")
            if choices and getattr(self, f.name) not in choices:
                raise ValueError(f"{f.name} must be one of {list(choices)}, got {getattr(self, f.name)!r}")
        for name in ("profile", "progress", "torch_compile"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be true or false, got {getattr(self, name)!r}")
        if not isinstance(self.log_with, (str, type(None))):
            raise TypeError(f"log_with must be a tracker's name, got {self.log_with!r}")
        if not isinstance(self.device, str):
            raise TypeError(f"device must be a text such as 'auto', 'cpu' or 'cuda', got {self.device!r}")
        given: Any = self.prompt_template
        if isinstance(given, (list, tuple)):  # one in a list is the same setting as the text alone
            object.__setattr__(self, "prompt_template", given[0] if len(given) == 1 else tuple(given))
        for template in self.templates or (given,):
            _check_template("prompt_template", template)
        if len(set(self.templates)) < len(self.templates):
            raise ValueError(f"prompt_template has the same text twice: {list(self.templates)}")
        if self.training_template is not None:
            _check_template("training_template", self.training_template)

    @property
    def templates(self) -> tuple[str, ...]:
        """The prompts that classifiers see, one or several."""
        return self.prompt_template if isinstance(self.prompt_template, tuple) else (self.prompt_template,)


def _check_template(name: str, template: Any) -> None:
    if not isinstance(template, str) or template.count("{}") != 1:
        raise ValueError(f"{name} must be a text with exactly one {{}}, got {template!r:.200}")
    if len(template) > 1000:  # far more than any text tower takes, and a tokenizer would need seconds to say so
        raise ValueError(f"{name} has {len(template)} characters, at most 1000 are allowed: {template!r:.60}...")
