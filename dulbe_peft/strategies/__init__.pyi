from .base import Memory as Memory
from .base import NewTask as NewTask
from .base import Step as Step
from .base import Strategy as Strategy
from .registry import STRATEGIES as STRATEGIES
from .registry import make_strategy as make_strategy
from .registry import register_strategy as register_strategy

__all__: list[str]
