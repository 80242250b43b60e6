from .data.looking import inspect_images as inspect_images
from .data.source import DataSource as DataSource
from .data.splits import hold_out as hold_out
from .deployment.batches import Featurizer as Featurizer
from .deployment.batches import Predictor as Predictor
from .deployment.formats import export_learner as export_learner

__all__: list[str]
