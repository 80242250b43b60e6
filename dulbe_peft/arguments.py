"""Define the settings of the adapter and of the learner, each with its help text.

The command line reads its flags from these classes, so this module imports nothing that is slow to import.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from dulbe_peft.utils.settings import LEAST, MOST, AtLeastOne, check_settings, documented, setting

Share = Annotated[float, "SHARE"]  # a share of images; help shows the word for its values

PAPER_RATE = 1e-3  # the paper's learning rate, for ViT-B/16 and ViT-L/14
# Settings of the machine. They are not saved with a learner, and a run can be resumed with different ones.
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


@documented
@dataclass
class AdapterSettings:
    """The settings of the adapter. [`DualModeLoraConfig`] checks them and passes them to PEFT."""

    shared_rank: Annotated[int, Ge(0)] = setting(
        1, "Rank r_S of the shared mode, inside the directions that earlier tasks used."
    )
    residual_rank: Annotated[int, Ge(0)] = setting(
        8, "Rank r_R of the residual modes, outside the directions that earlier tasks used."
    )
    support_rank: Annotated[int, Ge(1)] = setting(
        128,
        "K_h, the number of top eigenvectors of the input statistics that count as used by earlier tasks; reduced "
        "if a layer and its data have fewer.",
    )
    structure_weight: Annotated[float, Ge(0), Le(1e6)] = setting(0.5, "Weight lambda of the structure loss.")
    class_temperature: Annotated[float, Ge(LEAST), Le(1e6)] = setting(
        5.0, "Temperature tau_C of the softmax over old classes."
    )
    instance_temperature: Annotated[float, Ge(LEAST), Le(1e6)] = setting(
        0.1, "Temperature tau_I of the softmax over a batch."
    )
    target_modules: list[str] | str | None = setting(
        None,
        "Linear layers to adapt: a list of name endings, a regular expression, or 'all-linear'. None: keys, values "
        "and MLP, which are k_proj, v_proj, fc1 and fc2 in CLIP. In a dual encoder only the vision tower is adapted. "
        "A list and 'all-linear' do not adapt its pooling head; 'all-linear' does not adapt the projections either.",
    )
    exclude_modules: list[str] | str | None = setting(None, "Layers not to adapt, named as in target_modules.")
    text_rank: Annotated[int, Ge(0)] = setting(8, "Rank of the plain LoRA in the text tower; 0 turns it off.")
    text_alpha: Annotated[float, Ge(-MOST), Le(MOST)] = setting(
        1.0, "The text LoRA's scale is text_alpha / text_rank."
    )
    text_target_modules: list[str] | None = setting(
        None, "Text tower layers with LoRA, by name ending. None: keys, values and MLP."
    )
    init_weights: bool = setting(
        True, "True: B starts at zero, so the output starts as that of the base model. False: B is random."
    )
    layers_to_transform: list[int] | int | None = setting(None, "Indices of the vision blocks to adapt; None: all.")
    layers_pattern: list[str] | str | None = setting(
        None, "Name of the nn.ModuleList that layers_to_transform refers to."
    )
    fold: Literal["weight", "factors"] = setting(
        "weight",
        "How the vision tower stores finished tasks: weight: as one folded weight per layer, in addition to the base "
        "model's; factors: as low-rank factors, which take less memory, but more time with every task.",
    )
    modules_to_save: list[str] | None = setting(None, "Other modules to train fully and to save with the adapter.")

    def __post_init__(self) -> None:
        for name in (*_LISTS_OF_NAMES, "layers_to_transform"):
            if isinstance(getattr(self, name), (set, tuple)):
                setattr(self, name, list(getattr(self, name)))
        check_settings(self, AdapterSettings)
        for name in _LISTS_OF_NAMES:
            if isinstance(getattr(self, name), list):  # so that the same layers give the same file
                setattr(self, name, sorted(getattr(self, name)))
        if self.shared_rank + self.residual_rank == 0:
            raise ValueError("shared_rank and residual_rank are both 0: at least one must be positive")
        if self.target_modules == []:
            raise ValueError("target_modules is an empty list: name at least one layer, or pass None for the default")
        if self.text_target_modules == []:
            raise ValueError(
                "text_target_modules is an empty list: pass None for the default, or text_rank=0 for no LoRA there"
            )
        patterns = [self.layers_pattern] if isinstance(self.layers_pattern, str) else self.layers_pattern or []
        for field, names in (("layers_pattern", patterns), ("modules_to_save", self.modules_to_save or [])):
            for name in names:  # PEFT puts each name into a regular expression
                if not re.fullmatch(r"[\w.]+", name):
                    raise ValueError(f"{field} has {name!r}: a name can contain letters, digits, _ and dots")
        expression = isinstance(self.target_modules, str) and self.target_modules != "all-linear"
        if expression and self.layers_to_transform is not None:
            raise ValueError(
                "layers_to_transform cannot be used when target_modules is a regular expression "
                f"({self.target_modules!r}): name the layers in a list, or put the indices into the expression"
            )
        if self.layers_pattern and self.layers_to_transform is None:
            raise ValueError(f"layers_pattern={self.layers_pattern!r} has no effect without layers_to_transform")


@documented
@dataclass(frozen=True)
class LearnerArguments:
    """Settings of [`ClassIncrementalLearner`]. The defaults are the paper's, except for `drift`,
    `update_share` and `planning_images`.

    Raises:
        ValueError, TypeError: If a value is outside its limits, or has the wrong type; the message names the field.

    Reference:
        Section "Implementation Details". `docs/decisions.md` explains the values that the paper does not give.
    """

    epochs: Annotated[int, Ge(1)] = setting(2, "Number of passes over a task's images.")
    batch_size: Annotated[int, Ge(1)] = setting(32, "Images per training step.")
    eval_batch_size: Annotated[int, Ge(1)] = setting(64, "Images encoded at once.")
    learning_rate: Annotated[float, Ge(LEAST), Le(1e4)] | Literal["auto"] = setting(
        "auto",
        "Adam's learning rate at the start of a task. auto: the rate that was published with the strategy, or else "
        "1e-3, the paper's.",
    )
    update_share: Annotated[float, Ge(0), Le(1)] | Literal["auto"] = setting(
        "auto",
        "How much of what a task has changed in the vision tower is kept when it ends; the text LoRA is kept whole. "
        "The paper keeps all, 1. auto: at most 0.3, chosen after the training, from the share of the task's images "
        "for which the names were wrong before, and from how far the features of up to 64 of them have moved.",
    )
    planning_images: Annotated[int, Ge(1)] | Literal["all"] = setting(
        256,
        "From how many of a task's images, at most, its modes are planned and the share of its update is chosen. They "
        "are drawn evenly over the classes. The paper plans from all.",
    )
    lr_schedule: Literal["step", "epoch"] = setting(
        "step", "Cosine schedule. step: to 0, updated at every step; epoch: to 0.01 of the rate, updated every epoch."
    )
    kl_reduction: Literal["mean", "batchmean"] = setting(
        "mean", "mean: average over images and old classes; batchmean: sum over both, divided by the batch size."
    )
    teacher: Literal["cached", "online"] = setting(
        "cached", "cached: teacher features from the probe pass; online: computed at every step, for augmented data."
    )
    statistics_tokens: Literal["all", "cls", "patch"] = setting("all", "Tokens that the input statistics include.")
    prompt_template: str | tuple[str, ...] = setting(
        "a photo of a {}.",
        "Prompt, in which {} stands for the class name. With several prompts (a list, a text file with one per line, "
        "or one flag each), classifiers use the mean of the unit text embeddings.",
        repeated=True,
    )
    training_template: str | None = setting(None, "Prompt for training. None: the first prompt_template.")
    class_name_style: Literal["verbatim", "spaces"] = setting(
        "verbatim", "verbatim: class names are used unchanged; spaces: underscores are replaced by spaces."
    )
    image_resize: Literal["processor", "crop", "squash"] = setting(
        "processor",
        "How images are resized to the model's size. processor: as the model's processor does; crop: scale the short "
        "side and crop the centre; squash: scale the whole image to a square.",
    )
    whole_images: bool = setting(
        False,
        "Decode JPEG files whole. Otherwise large ones are decoded at 1/2, 1/4 or 1/8 of their size, with at least "
        "1,344 pixels a side, and six times as many as the model reads.",
    )
    features: Literal["projected", "unprojected"] = setting(
        "projected",
        "Which image features classifiers learn. projected: those that are compared with names; unprojected: what the "
        "projection reads, which is wider. text and bayes then compare names with its projection, and other "
        "classifiers of names are refused.",
    )
    augment: str = setting(
        "none",
        "Random changes of images: crop, flip, affine, or several joined by +. Training uses a new view of each image "
        "in every epoch. Classifiers that keep sums also learn views of each image.",
    )
    copies: Annotated[int, Ge(0), Le(1000)] = setting(
        3, "Number of views that classifiers learn besides each image, with augment; all count 1 / (1 + copies)."
    )
    text_embeds: Literal["current", "at_introduction"] = setting(
        "current",
        "current: encode all seen classes again after each task; at_introduction: keep the first embeddings.",
    )
    drift: Literal["auto", "none", "linear"] = setting(
        "auto",
        "How the statistics of old classes follow the features after training. auto: by a linear map whose ridge is "
        "chosen on left-out classes, or not at all if no map helps; none: not at all; linear: by a linear map with a "
        "fixed ridge.",
    )
    seed: Annotated[int, Ge(0), Le(2**63 - 1)] = setting(0, "Seed for the initial weights and the order of images.")
    num_workers: Annotated[int, Ge(0), Le(1000)] | Literal["auto"] = setting(
        "auto", "Processes that read images. auto: threads read files; 0: only the main thread reads."
    )
    pixel_cache_mb: Annotated[int, Ge(0)] = setting(1024, "Keep at most this many MiB of preprocessed images.")
    device: str = setting("auto", "auto, cpu, or an accelerator: cuda, mps.")
    precision: Literal["auto", "float32", "bfloat16", "int8"] = setting(
        "auto",
        "Numeric type. auto: as saved; for a new learner bfloat16 if the hardware has it and nothing is trained.",
    )
    backend: Literal["torch", "onnx", "openvino"] = setting(
        "torch", "Library that encodes images on a CPU when nothing is trained."
    )
    force: bool = setting(False, "Use a backend even if results differ.")
    torch_compile: bool = setting(False, "Compile the image tower with torch.compile; needs a C++ compiler.")
    profile: bool = setting(False, "Print how long each part of a task took.")
    log_with: str | None = setting(
        None, "Tracker of accelerate, such as tensorboard, wandb or trackio; needs its package."
    )
    progress: bool = setting(True, "Show progress bars.")

    def portable(self) -> dict[str, object]:
        """Return the settings that are saved with a learner, its model card and a run: all except the machine's."""
        return {name: value for name, value in asdict(self).items() if name not in MACHINE_SETTINGS}

    def __post_init__(self) -> None:
        given: Any = self.prompt_template
        if isinstance(given, (list, tuple)):  # a list with one prompt is the same setting as the prompt alone
            object.__setattr__(self, "prompt_template", given[0] if len(given) == 1 else tuple(given))
        check_settings(self)
        for template in self.templates or ("",):
            check_template("prompt_template", template)
        if len(set(self.templates)) < len(self.templates):
            raise ValueError(f"prompt_template has the same text twice: {list(self.templates)}")
        kinds = self.augment.split("+")
        if self.augment != "none" and (len(set(kinds)) < len(kinds) or not set(kinds) <= set(AUGMENTATIONS)):
            names = ", ".join(AUGMENTATIONS)
            raise ValueError(f"augment must be none, or some of {names} with + between, got {self.augment!r:.100}")
        if self.backend == "onnx" and self.precision == "bfloat16":
            raise ValueError("precision 'bfloat16' is not supported by onnxruntime on a CPU: choose another backend")
        if self.precision == "int8" and self.backend != "openvino":
            raise ValueError(f"precision 'int8' needs the backend 'openvino', got the backend {self.backend!r}")
        if self.training_template is not None:
            check_template("training_template", self.training_template)

    @property
    def templates(self) -> tuple[str, ...]:
        """Return the prompts that classifiers use, one or several."""
        return self.prompt_template if isinstance(self.prompt_template, tuple) else (self.prompt_template,)


def check_template(name: str, template: str) -> None:
    """Raise a `ValueError` unless a prompt template has one place, `{}`, for the name of a class."""
    if not isinstance(template, str) or template.count("{}") != 1:
        raise ValueError(f"{name} must be a text with exactly one {{}}, got {template!r:.200}")
    if re.fullmatch(r"""\s*[fr]?(["']).*\1\s*,?\s*""", template):
        raise ValueError(f"{name} has the quotation marks of a program around it: leave them out of {template!r:.200}")
    if len(template) > 1000:  # far more than a text tower reads; a tokenizer would take seconds
        raise ValueError(f"{name} has {len(template)} characters, at most 1000 are allowed: {template!r:.60}...")


@dataclass(frozen=True)
class Query:
    """What is asked about each image, see `ClassIncrementalLearner.predict`."""

    top_k: AtLeastOne = setting(1, "how many classes to give for each image")
    reject: Share | None = setting(None, 'allow "none of these" with this share of false alarms')
    coverage: Share | None = setting(None, "give sets that hold the right class this often")
    novelty: bool = setting(False, "say how unlike all learned images the image is")
    only: tuple[str, ...] | None = setting(None, "the only classes that are possible, such as those of a site")
    sum_up: Mapping[str, str] | None = setting(None, "class -> group: give groups, whose probabilities are summed")

    def __post_init__(self) -> None:
        if isinstance(self.only, list):
            object.__setattr__(self, "only", tuple(self.only))
        check_settings(self)
        if self.coverage is not None and self.top_k != 1:
            raise ValueError(f"top_k is {self.top_k} and coverage is {self.coverage}: give only one of them")
