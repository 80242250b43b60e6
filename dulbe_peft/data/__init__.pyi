from .folders import ImageFolder as ImageFolder
from .images import LabelledImages as LabelledImages
from .readers import load_data as load_data
from .store import FeatureStore as FeatureStore

__all__: list[str]
