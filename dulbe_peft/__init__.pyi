from .adapter.config import DualModeLoraConfig as DualModeLoraConfig
from .adapter.gradients import probe_gradients as probe_gradients
from .adapter.gradients import route_gradients as route_gradients
from .adapter.gradients import routed_loss as routed_loss
from .adapter.lora_export import export_lora as export_lora
from .adapter.model import DualModeLoraModel as DualModeLoraModel
from .arguments import LearnerArguments as LearnerArguments
from .classifiers.base import Classifier as Classifier
from .classifiers.bridge import BridgeEnsembleHead as BridgeEnsembleHead
from .classifiers.geodesics import slerp as slerp
from .classifiers.pooled_bridge import PooledBridgeHead as PooledBridgeHead
from .classifiers.registry import CLASSIFIERS as CLASSIFIERS
from .classifiers.registry import register_classifier as register_classifier
from .encoders.loading import load_clip as load_clip
from .encoders.loading import load_dual_encoder as load_dual_encoder
from .learner import ClassIncrementalLearner as ClassIncrementalLearner
from .strategies.base import Strategy as Strategy
from .strategies.losses import bidirectional_kl as bidirectional_kl
from .strategies.losses import cross_modal_loss as cross_modal_loss
from .strategies.registry import STRATEGIES as STRATEGIES
from .strategies.registry import register_strategy as register_strategy
from .streams.run import run_stream as run_stream
from .streams.tasks import Task as Task
from .streams.tasks import class_incremental_tasks as class_incremental_tasks
from .subspaces.allocation import allocate_modes as allocate_modes
from .subspaces.inputs import collect_statistics as collect_statistics
from .subspaces.modes import ModeBases as ModeBases
from .subspaces.occupation import OccupationStatistics as OccupationStatistics
from .trainer import DualModeTrainer as DualModeTrainer
from .training.trainer_arguments import paper_arguments as paper_arguments
from .utils.folders import CheckpointError as CheckpointError

__all__: list[str]
__version__: str
