from .data.inventory import inspect_images as inspect_images
from .data.splits import hold_out as hold_out
from .data.splits import open_stream_data as open_stream_data
from .deployment.batches import Featurizer as Featurizer
from .deployment.batches import Predictor as Predictor
from .deployment.export import export_learner as export_learner

__all__: list[str]
