"""The settings of an adapter and of a learner. The help text of each stands once, here.

The command line reads the flags from these classes, so this file imports nothing that takes time.
"""

import re
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from dulbe_peft.utils.settings import LEAST, MOST, check_settings, setting

PAPER_RATE = 1e-3  # the paper's learning rate, for ViT-B/16 and ViT-L/14
# Settings of the machine: they do not travel with a saved learner, and a run may be resumed with others.
MACHINE_SETTINGS = (
    "backend",
    "device",
    "eval_batch_size",
    "force",
    "log_with",
    "num_workers",
    "pixel_cache_mb",
    "profile",
    "progress",
    "torch_compile",
)
AUGMENTATIONS = ("crop", "flip", "affine")
_LISTS_OF_NAMES = ("target_modules", "exclude_modules", "text_target_modules", "modules_to_save")


@dataclass
class AdapterSettings:
    """The settings of the adapter, which [`DualModeLoraConfig`] checks and hands to PEFT."""

    shared_rank: Annotated[int, Ge(0)] = setting(1, "Rank r_S of the shared mode, inside directions used before.")
    residual_rank: Annotated[int, Ge(0)] = setting(8, "Rank r_R of the residual modes, outside those directions.")
    support_rank: Annotated[int, Ge(1)] = setting(
        128,
        "K_h, how many top eigenvectors of the input statistics count as historically used; clamped to what a layer "
        "and its data allow.",
    )
    structure_weight: Annotated[float, Ge(0), Le(1e6)] = setting(0.5, "lambda, the weight of the structure loss.")
    class_temperature: Annotated[float, Ge(LEAST), Le(1e6)] = setting(5.0, "tau_C, softmax over the old classes.")
    instance_temperature: Annotated[float, Ge(LEAST), Le(1e6)] = setting(0.1, "tau_I, softmax over a batch's images.")
    target_modules: list[str] | str | None = setting(
        None,
        "Linear layers to adapt: a list of name endings, a regular expression, or 'all-linear'. None: keys, values "
        "and MLP, which are k_proj, v_proj, fc1 and fc2 in CLIP. Inside a dual encoder only the vision tower is "
        "adapted; a list and 'all-linear' leave its pooling head alone, 'all-linear' also the projections.",
    )
    exclude_modules: list[str] | str | None = setting(None, "Layers to leave alone, named as target_modules are.")
    text_rank: Annotated[int, Ge(0)] = setting(8, "Rank of the plain LoRA in the text tower; 0 turns it off.")
    text_alpha: Annotated[float, Ge(-MOST), Le(MOST)] = setting(
        1.0, "The text LoRA's scale is text_alpha / text_rank."
    )
    text_target_modules: list[str] | None = setting(
        None,
        "Name endings of the text tower's layers with LoRA. None: keys, values and MLP.",
    )
    init_weights: bool = setting(True, "True: B starts at zero, the output is the base model's. False: random B.")
    layers_to_transform: list[int] | int | None = setting(None, "Indices of the vision blocks to adapt; None: all.")
    layers_pattern: list[str] | str | None = setting(None, "Name of the nn.ModuleList that layers_to_transform means.")
    fold: Literal["weight", "factors"] = setting(
        "weight",
        "How the vision tower has its finished tasks: as one folded weight a layer, kept beside the base model's, or "
        "as factors, which take less memory, and more time with every task.",
    )
    modules_to_save: list[str] | None = setting(None, "Further modules to train in full and to save with the adapter.")

    def __post_init__(self) -> None:
        for name in (*_LISTS_OF_NAMES, "layers_to_transform"):
            if isinstance(getattr(self, name), (set, tuple)):
                setattr(self, name, list(getattr(self, name)))
        check_settings(self, AdapterSettings)
        for name in _LISTS_OF_NAMES:
            if isinstance(getattr(self, name), list):  # the same layers give the same file
                setattr(self, name, sorted(getattr(self, name)))
        if self.shared_rank + self.residual_rank == 0:
            raise ValueError("shared_rank and residual_rank are both 0: at least one must be positive")
        if self.target_modules == []:
            raise ValueError("target_modules is an empty list: name at least one layer, or pass None for the default")
        patterns = [self.layers_pattern] if isinstance(self.layers_pattern, str) else self.layers_pattern or []
        for field, names in (("layers_pattern", patterns), ("modules_to_save", self.modules_to_save or [])):
            for name in names:  # PEFT puts each into an expression of its own
                if not re.fullmatch(r"[\w.]+", name):
                    raise ValueError(f"{field} has {name!r}: a name has letters, digits, _ and dots")
        expression = isinstance(self.target_modules, str) and self.target_modules != "all-linear"
        if expression and self.layers_to_transform is not None:
            raise ValueError(
                "layers_to_transform cannot be used when target_modules is a regular expression "
                f"({self.target_modules!r}): name the layers in a list, or put the indices into the expression"
            )
        if self.layers_pattern and self.layers_to_transform is None:
            raise ValueError(f"layers_pattern={self.layers_pattern!r} has no effect without layers_to_transform")


@dataclass(frozen=True)
class LearnerArguments:
    """Settings of [`ClassIncrementalLearner`]; the defaults are the paper's, for a model of the paper's size.

    Raises:
        ValueError, TypeError: a value is out of its limits, or has another type; the message names the field.

    Reference:
        "Implementation Details"; where the paper is silent, `docs/decisions.md`.
    """

    epochs: Annotated[int, Ge(1)] = setting(2, "Passes over a task's images.")
    batch_size: Annotated[int, Ge(1)] = setting(32, "Images per training step.")
    eval_batch_size: Annotated[int, Ge(1)] = setting(64, "Images per batch where nothing is trained.")
    learning_rate: Annotated[float, Ge(LEAST), Le(1e4)] | Literal["auto"] = setting(
        "auto",
        "Adam's learning rate as a task begins. auto: the paper's 1e-3 for a model of ViT-B's width or more; for a "
        "smaller one 1e-4, or less where a trial on the first task moves its features much.",
    )
    lr_schedule: Literal["step", "epoch"] = setting(
        "step", "Cosine to 0 at every step, or at every epoch to a floor of 0.01 of the rate."
    )
    kl_reduction: Literal["mean", "batchmean"] = setting(
        "mean", "Mean over images and over old classes, or both sums divided by the batch size."
    )
    teacher: Literal["cached", "online"] = setting(
        "cached", "Teacher features from the probe pass, or computed at every step (for augmented data)."
    )
    statistics_tokens: Literal["all", "cls", "patch"] = setting("all", "Which tokens enter the input statistics.")
    prompt_template: str | tuple[str, ...] = setting(
        "a photo of a {}.",
        "Prompt; {} takes the class name. Of several (a list, a text file with one a line, or one flag each), "
        "classifiers take the mean of the unit text embeddings.",
        repeated=True,
    )
    training_template: str | None = setting(None, "Prompt that training uses. None: the first prompt_template.")
    class_name_style: Literal["verbatim", "spaces"] = setting(
        "verbatim", "Names as they are, or underscores as spaces."
    )
    image_resize: Literal["processor", "crop", "squash"] = setting(
        "processor",
        "How an image gets the model's size: as the model's processor does it, by the short side and a centre crop, "
        "or the whole image as a square.",
    )
    augment: str = setting(
        "none",
        "Change images at random: crop, flip, affine, or several with + between them. Training sees another view of "
        "each image in every epoch. Classifiers that keep sums learn further views of each image.",
    )
    copies: Annotated[int, Ge(0), Le(1000)] = setting(
        3, "How many views they learn beside the image, where augment is set; each counts 1 / (1 + copies)."
    )
    text_embeds: Literal["current", "at_introduction"] = setting(
        "current", "Encode all seen classes anew after each task, or keep each as it was when its class arrived."
    )
    drift: Literal["auto", "none", "linear"] = setting(
        "auto",
        "When a trained task closes: move what classifiers store along, as far as left-out classes say that it helps; "
        "leave it as it is; or move it by one map of the features, with a fixed ridge.",
    )
    seed: Annotated[int, Ge(0), Le(2**63 - 1)] = setting(0, "Seed of the initial weights and of the order of images.")
    num_workers: Annotated[int, Ge(0), Le(1000)] = setting(0, "Processes that read images; 0: the main process does.")
    pixel_cache_mb: Annotated[int, Ge(0)] = setting(1024, "Keep a task's preprocessed images up to so many MiB.")
    device: str = setting("auto", "auto, cpu, or an accelerator's type such as cuda.")
    precision: Literal["auto", "float32", "bfloat16", "int8"] = setting(
        "auto",
        "auto: what a learner learned in; a new one bfloat16 where the hardware has it and nothing is trained.",
    )
    backend: Literal["torch", "onnx", "openvino"] = setting(
        "torch", "What encodes images on a processor while nothing is trained."
    )
    force: bool = setting(False, "Use a backend that answers otherwise, too.")
    torch_compile: bool = setting(False, "Compile the image tower with torch.compile; needs a C++ compiler.")
    profile: bool = setting(False, "Print where the time of each task went.")
    log_with: str | None = setting(None, "Tracker of accelerate: tensorboard, wandb, trackio, ...; needs its package.")
    progress: bool = setting(True, "Show progress bars.")

    def portable(self) -> dict[str, Any]:
        """The settings without the machine's: what a saved learner, its model card and a run's identity hold."""
        return {name: value for name, value in asdict(self).items() if name not in MACHINE_SETTINGS}

    def __post_init__(self) -> None:
        given: Any = self.prompt_template
        if isinstance(given, (list, tuple)):  # one in a list is the same setting as the text alone
            object.__setattr__(self, "prompt_template", given[0] if len(given) == 1 else tuple(given))
        check_settings(self)
        for template in self.templates or ("",):
            _check_template("prompt_template", template)
        if len(set(self.templates)) < len(self.templates):
            raise ValueError(f"prompt_template has the same text twice: {list(self.templates)}")
        kinds = self.augment.split("+")
        if self.augment != "none" and (len(set(kinds)) < len(kinds) or not set(kinds) <= set(AUGMENTATIONS)):
            names = ", ".join(AUGMENTATIONS)
            raise ValueError(f"augment must be none, or some of {names} with + between, got {self.augment!r:.100}")
        if self.backend == "onnx" and self.precision == "bfloat16":
            raise ValueError("precision is 'bfloat16', and onnxruntime has none on a processor: take another backend")
        if self.precision == "int8" and self.backend != "openvino":
            raise ValueError(f"precision 'int8' is of the backend 'openvino', got the backend {self.backend!r}")
        if self.training_template is not None:
            _check_template("training_template", self.training_template)

    @property
    def templates(self) -> tuple[str, ...]:
        """The prompts that classifiers see, one or several."""
        return self.prompt_template if isinstance(self.prompt_template, tuple) else (self.prompt_template,)


def _check_template(name: str, template: str) -> None:
    if template.count("{}") != 1:
        raise ValueError(f"{name} must be a text with exactly one {{}}, got {template!r:.200}")
    if len(template) > 1000:  # far more than any text tower takes, and a tokenizer would need seconds to say so
        raise ValueError(f"{name} has {len(template)} characters, at most 1000 are allowed: {template!r:.60}...")
