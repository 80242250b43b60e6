"""Dual-mode low-rank adapters and bridge-prototype heads for CLIP-like models that keep learning new classes.

`import dulbe_peft` registers the method with PEFT.
"""

from dulbe_peft.adapter.config import DualModeLoraConfig
from dulbe_peft.adapter.export import export_lora
from dulbe_peft.adapter.gradients import probe_gradients, route_gradients
from dulbe_peft.adapter.layer import DualModeLinear
from dulbe_peft.adapter.model import DualModeLoraModel, register
from dulbe_peft.arguments import LearnerArguments
from dulbe_peft.classifiers import CLASSIFIERS, register_classifier
from dulbe_peft.classifiers.base import Classifier
from dulbe_peft.classifiers.bayes import BayesClassifier
from dulbe_peft.classifiers.bridge import BridgeEnsembleHead
from dulbe_peft.classifiers.geodesics import slerp
from dulbe_peft.classifiers.lda import LdaClassifier
from dulbe_peft.classifiers.prototype import PrototypeClassifier
from dulbe_peft.classifiers.ranpac import RanpacClassifier
from dulbe_peft.classifiers.ridge import RidgeClassifier
from dulbe_peft.classifiers.text import TextClassifier
from dulbe_peft.data.inventory import inspect_images
from dulbe_peft.data.readers import ImageFolder, NpzImages, load_data
from dulbe_peft.data.splits import hold_out, open_stream_data
from dulbe_peft.deployment.export import export_learner, export_onnx, export_transformers
from dulbe_peft.encoders.loading import load_clip, load_dual_encoder
from dulbe_peft.learner import ClassIncrementalLearner
from dulbe_peft.strategies import STRATEGIES, Strategy, register_strategy
from dulbe_peft.strategies.losses import bidirectional_kl, cross_modal_loss
from dulbe_peft.streams.tasks import Task, class_incremental_tasks
from dulbe_peft.subspaces.allocation import allocate_modes
from dulbe_peft.subspaces.inputs import collect_statistics
from dulbe_peft.subspaces.modes import ModeBases
from dulbe_peft.subspaces.occupation import OccupationStatistics
from dulbe_peft.training.state import LearnerState
from dulbe_peft.utils.folders import CheckpointError

__version__ = "0.2.0"

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
