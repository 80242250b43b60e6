"""Dual-mode low-rank adapters and bridge-prototype heads for CLIP-like models that keep learning new classes.

`import dulbe_peft` registers the method with PEFT.
"""

from dulbe_peft.adapter.config import DualModeLoraConfig
from dulbe_peft.adapter.export import export_lora
from dulbe_peft.adapter.gradients import probe_gradients, route_gradients
from dulbe_peft.adapter.layer import DualModeLinear
from dulbe_peft.adapter.model import DualModeLoraModel, register
from dulbe_peft.adapter.modes import ModeBases
from dulbe_peft.allocation import allocate_modes
from dulbe_peft.arguments import LearnerArguments
from dulbe_peft.backbone import load_clip, load_dual_encoder
from dulbe_peft.checkpoint import CheckpointError
from dulbe_peft.classifiers import CLASSIFIERS, register_classifier
from dulbe_peft.classifiers.base import Classifier
from dulbe_peft.classifiers.bayes import BayesClassifier
from dulbe_peft.classifiers.bridge import BridgeEnsembleHead
from dulbe_peft.classifiers.lda import LdaClassifier
from dulbe_peft.classifiers.prototype import PrototypeClassifier
from dulbe_peft.classifiers.ranpac import RanpacClassifier
from dulbe_peft.classifiers.ridge import RidgeClassifier
from dulbe_peft.classifiers.text import TextClassifier
from dulbe_peft.collecting import collect_statistics
from dulbe_peft.deployment.export import export_learner, export_onnx, export_transformers
from dulbe_peft.functional import bidirectional_kl, cross_modal_loss, slerp
from dulbe_peft.learner import ClassIncrementalLearner
from dulbe_peft.state import LearnerState
from dulbe_peft.statistics import OccupationStatistics
from dulbe_peft.strategies import STRATEGIES, Strategy, register_strategy
from dulbe_peft.streams.inventory import inspect_images
from dulbe_peft.streams.readers import ImageFolder, NpzImages, load_data
from dulbe_peft.streams.splits import hold_out, open_stream_data
from dulbe_peft.streams.tasks import Task, class_incremental_tasks

__version__ = "0.1.0"

__all__ = [
    "CLASSIFIERS",
    "STRATEGIES",
    "BayesClassifier",
    "BridgeEnsembleHead",
    "CheckpointError",
    "ClassIncrementalLearner",
    "Classifier",
    "DualModeLinear",
    "DualModeLoraConfig",
    "DualModeLoraModel",
    "ImageFolder",
    "LdaClassifier",
    "LearnerArguments",
    "LearnerState",
    "ModeBases",
    "NpzImages",
    "OccupationStatistics",
    "PrototypeClassifier",
    "RanpacClassifier",
    "RidgeClassifier",
    "Strategy",
    "Task",
    "TextClassifier",
    "allocate_modes",
    "bidirectional_kl",
    "class_incremental_tasks",
    "collect_statistics",
    "cross_modal_loss",
    "export_learner",
    "export_lora",
    "export_onnx",
    "export_transformers",
    "hold_out",
    "inspect_images",
    "load_clip",
    "load_data",
    "load_dual_encoder",
    "open_stream_data",
    "probe_gradients",
    "register_classifier",
    "register_strategy",
    "route_gradients",
    "slerp",
]

register()
