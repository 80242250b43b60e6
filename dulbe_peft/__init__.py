"""Dual-mode low-rank adapters and bridge-prototype heads for CLIP-like models that keep learning new classes.

`import dulbe_peft` registers the method with PEFT as soon as both are imported, in either order. It imports neither
PEFT nor torch: a name of the list below is imported when somebody asks for it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dulbe_peft.utils.imports import when_imported

if TYPE_CHECKING:
    from dulbe_peft.adapter.config import DualModeLoraConfig as DualModeLoraConfig
    from dulbe_peft.adapter.export import export_lora as export_lora
    from dulbe_peft.adapter.gradients import probe_gradients as probe_gradients
    from dulbe_peft.adapter.gradients import route_gradients as route_gradients
    from dulbe_peft.adapter.layer import DualModeLinear as DualModeLinear
    from dulbe_peft.adapter.model import DualModeLoraModel as DualModeLoraModel
    from dulbe_peft.arguments import LearnerArguments as LearnerArguments
    from dulbe_peft.classifiers import CLASSIFIERS as CLASSIFIERS
    from dulbe_peft.classifiers import register_classifier as register_classifier
    from dulbe_peft.classifiers.base import Classifier as Classifier
    from dulbe_peft.classifiers.bayes import BayesClassifier as BayesClassifier
    from dulbe_peft.classifiers.bridge import BridgeEnsembleHead as BridgeEnsembleHead
    from dulbe_peft.classifiers.geodesics import slerp as slerp
    from dulbe_peft.classifiers.lda import LdaClassifier as LdaClassifier
    from dulbe_peft.classifiers.prototype import PrototypeClassifier as PrototypeClassifier
    from dulbe_peft.classifiers.ranpac import RanpacClassifier as RanpacClassifier
    from dulbe_peft.classifiers.ridge import RidgeClassifier as RidgeClassifier
    from dulbe_peft.classifiers.text import TextClassifier as TextClassifier
    from dulbe_peft.data.folders import ImageFolder as ImageFolder
    from dulbe_peft.data.inventory import inspect_images as inspect_images
    from dulbe_peft.data.readers import load_data as load_data
    from dulbe_peft.data.splits import hold_out as hold_out
    from dulbe_peft.data.splits import open_stream_data as open_stream_data
    from dulbe_peft.deployment.export import export_learner as export_learner
    from dulbe_peft.deployment.export import export_onnx as export_onnx
    from dulbe_peft.deployment.export import export_transformers as export_transformers
    from dulbe_peft.encoders.loading import load_clip as load_clip
    from dulbe_peft.encoders.loading import load_dual_encoder as load_dual_encoder
    from dulbe_peft.learner import ClassIncrementalLearner as ClassIncrementalLearner
    from dulbe_peft.strategies import STRATEGIES as STRATEGIES
    from dulbe_peft.strategies import Strategy as Strategy
    from dulbe_peft.strategies import register_strategy as register_strategy
    from dulbe_peft.strategies.losses import bidirectional_kl as bidirectional_kl
    from dulbe_peft.strategies.losses import cross_modal_loss as cross_modal_loss
    from dulbe_peft.streams.tasks import Task as Task
    from dulbe_peft.streams.tasks import class_incremental_tasks as class_incremental_tasks
    from dulbe_peft.subspaces.allocation import allocate_modes as allocate_modes
    from dulbe_peft.subspaces.inputs import collect_statistics as collect_statistics
    from dulbe_peft.subspaces.modes import ModeBases as ModeBases
    from dulbe_peft.subspaces.occupation import OccupationStatistics as OccupationStatistics
    from dulbe_peft.training.state import LearnerState as LearnerState
    from dulbe_peft.utils.folders import CheckpointError as CheckpointError

__version__ = "0.2.0"

# Where each public name is at home.
_NAMES = {
    "adapter.config": "DualModeLoraConfig",
    "adapter.export": "export_lora",
    "adapter.gradients": "probe_gradients route_gradients",
    "adapter.layer": "DualModeLinear",
    "adapter.model": "DualModeLoraModel",
    "arguments": "LearnerArguments",
    "classifiers": "CLASSIFIERS register_classifier",
    "classifiers.base": "Classifier",
    "classifiers.bayes": "BayesClassifier",
    "classifiers.bridge": "BridgeEnsembleHead",
    "classifiers.geodesics": "slerp",
    "classifiers.lda": "LdaClassifier",
    "classifiers.prototype": "PrototypeClassifier",
    "classifiers.ranpac": "RanpacClassifier",
    "classifiers.ridge": "RidgeClassifier",
    "classifiers.text": "TextClassifier",
    "data.folders": "ImageFolder",
    "data.inventory": "inspect_images",
    "data.readers": "load_data",
    "data.splits": "hold_out open_stream_data",
    "deployment.export": "export_learner export_onnx export_transformers",
    "encoders.loading": "load_clip load_dual_encoder",
    "learner": "ClassIncrementalLearner",
    "strategies": "STRATEGIES Strategy register_strategy",
    "strategies.losses": "bidirectional_kl cross_modal_loss",
    "streams.tasks": "Task class_incremental_tasks",
    "subspaces.allocation": "allocate_modes",
    "subspaces.inputs": "collect_statistics",
    "subspaces.modes": "ModeBases",
    "subspaces.occupation": "OccupationStatistics",
    "training.state": "LearnerState",
    "utils.folders": "CheckpointError",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


when_imported("peft", lambda: import_module(f"{__name__}.adapter.model").register())
