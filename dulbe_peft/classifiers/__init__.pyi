from .base import Classifier as Classifier
from .base import classifier_of as classifier_of
from .bayes import BayesClassifier as BayesClassifier
from .bridge import BridgeEnsembleHead as BridgeEnsembleHead
from .gda import GdaClassifier as GdaClassifier
from .geodesics import slerp as slerp
from .lda import LdaClassifier as LdaClassifier
from .pooled_bridge import PooledBridgeHead as PooledBridgeHead
from .prototype import PrototypeClassifier as PrototypeClassifier
from .ranpac import RanpacClassifier as RanpacClassifier
from .registry import CLASSIFIERS as CLASSIFIERS
from .registry import Recipe as Recipe
from .registry import answering as answering
from .registry import make_classifier as make_classifier
from .registry import make_classifiers as make_classifiers
from .registry import parse_classifier as parse_classifier
from .registry import parse_classifiers as parse_classifiers
from .registry import register_classifier as register_classifier
from .registry import spec as spec
from .ridge import RidgeClassifier as RidgeClassifier
from .rule import Rule as Rule
from .state import Fitted as Fitted
from .state import once as once
from .state import per_class as per_class
from .state import shared as shared
from .text import TextClassifier as TextClassifier

__all__: list[str]
