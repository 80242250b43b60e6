"""Random sequences of operations on a model with up to three adapters, beside dense updates in float64.

The reference knows nothing of factors, caches or blocks: an adapter is the sum of its finished tasks and the present
task's P and B, each a plain matrix for every layer. After every operation the model's outputs are those of the
reference, and an operation is refused where the reference says so, and nowhere else.
"""

import copy
import pickle
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from peft import PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch import nn

from dulbe_peft import DualModeLoraConfig, ModeBases

SIZES = (6, 9, 5)
RANKS = (1, 2)
NAMES = ("default", "b", "c")
X = torch.randn(4, SIZES[0], generator=torch.Generator().manual_seed(1))
SHARES = st.sampled_from([0.0, 0.25, 0.6, 1.0])
SEEDS = st.integers(0, 2**20)
Dense = list[torch.Tensor]  # a float64 matrix for every layer


def base():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(*SIZES[:2]), nn.Tanh(), nn.Linear(*SIZES[1:])).eval()


def config(fold):
    ranks = dict(zip(("shared_rank", "residual_rank"), RANKS, strict=True))
    return DualModeLoraConfig(target_modules=["0", "2"], text_rank=0, support_rank=2, fold=fold, **ranks)


@dataclass
class Adapter:
    """The literal adapter: finished tasks, and P and B of the present one."""

    finished: Dense
    down: Dense
    up: Dense
    begun: tuple[Dense, Dense] | None  # P and B when the task began; None after loading

    @property
    def modes(self):
        return [up @ down.T for up, down in zip(self.up, self.down, strict=True)]

    @property
    def whole(self):
        return [a + b for a, b in zip(self.finished, self.modes, strict=True)]

    @property
    def trained(self):
        return any(up.any() for up in self.up)

    def began(self):
        self.begun = copy.deepcopy((self.down, self.up))

    def finish(self):
        if self.trained:
            self.finished, self.up = self.whole, [torch.zeros_like(up) for up in self.up]
            self.began()


def scaled(factor, update):
    return [factor * part for part in update]


class Sequences(RuleBasedStateMachine):
    @initialize(fold=st.sampled_from(["weight", "factors"]), seed=SEEDS)
    def start(self, fold, seed):
        torch.manual_seed(seed)
        self.fold = fold
        self.layers = [copy.deepcopy(layer).double() for layer in base() if isinstance(layer, nn.Linear)]
        self.model = get_peft_model(base(), config(fold)).eval()
        self.adapters, self.active, self.merged = {}, ["default"], {}
        self.note("default")

    # ------------------------------------------------------------ the reference

    def live(self):
        return [layer for layer in self.model.modules() if hasattr(layer, "dulbe_P")]

    def note(self, name):
        """Take up a new adapter's random bases. PEFT unmerges when one is added or made active."""
        self.merged = {}
        downs = [layer.dulbe_P[name].double() for layer in self.live()]
        ups = [torch.zeros(size, sum(RANKS), dtype=torch.float64) for size in SIZES[1:]]
        zeros = [torch.zeros_like(layer.weight) for layer in self.layers]
        self.adapters[name] = Adapter(zeros, downs, ups, None)
        self.adapters[name].began()

    def expected(self, updates, x=X):
        for index, layer in enumerate(self.layers):
            x = x.double() @ (layer.weight + sum(update[index] for update in updates)).T + layer.bias
            x = x.tanh() if not index else x
        return x.detach()

    def acting(self):
        return list(self.merged.values()) if self.merged else [self.adapters[name].whole for name in self.active]

    @torch.no_grad()
    def check(self, updates=None, **kwargs):
        expected = self.expected(self.acting() if updates is None else updates)
        torch.testing.assert_close(self.model(X, **kwargs).double(), expected, rtol=2e-5, atol=2e-5)

    def refused(self, call, words):
        with pytest.raises(ValueError, match=words):
            call()

    @property
    def now(self):
        return self.adapters[self.active[0]]

    def between_tasks(self, call):
        """Return whether an operation between tasks is allowed now; if it is not, check that it is refused."""
        reasons = {"one adapter must be active": len(self.active) != 1, "merged into the base weights": self.merged}
        if any(reasons.values()):
            self.refused(call, "|".join(words for words, holds in reasons.items() if holds))
        else:
            return True
        return False

    @invariant()
    def outputs_are_right(self):
        if hasattr(self, "model"):
            self.check()

    # ------------------------------------------------------------ tasks

    @rule(seed=SEEDS)
    def begin_task(self, seed):
        generator = torch.Generator().manual_seed(seed)
        modes = {}
        for name, size in zip(("0", "2"), SIZES[:2], strict=True):
            basis = torch.linalg.qr(torch.randn(size, sum(RANKS), generator=generator))[0]
            modes[name] = ModeBases(*basis.split(RANKS, dim=1))
        if self.between_tasks(lambda: self.model.begin_task(modes)):
            self.model.begin_task(modes)
            self.now.finish()
            self.now.down = [torch.cat([pair.shared, pair.residual], 1).double() for pair in modes.values()]
            self.now.up = [torch.zeros_like(up) for up in self.now.up]
            self.now.began()

    @rule(seed=SEEDS, through_data=st.booleans())
    def train(self, seed, through_data):
        generator = torch.Generator().manual_seed(seed)
        for name in self.active:
            for layer, up in zip(self.live(), self.adapters[name].up, strict=True):
                step = 0.3 * torch.randn(up.shape, generator=generator)
                up += step.double()
                parts = step.split(RANKS, dim=1)
                for part, parameter in zip(
                    parts, (layer.dulbe_shared_B[name], layer.dulbe_residual_B[name]), strict=True
                ):
                    if through_data:
                        parameter.data.add_(part)
                    else:
                        with torch.no_grad():
                            parameter += part

    @rule(share=SHARES)
    def fold_task(self, share):
        if not self.between_tasks(lambda: self.model.fold_task(share=share)):
            return
        if share != 1 and self.now.begun is None:
            return self.refused(lambda: self.model.fold_task(share=share), "not known how this task began")
        self.model.fold_task(share=share)
        self.kept(share)
        self.now.finish()

    @rule(share=SHARES)
    def keep_share(self, share):
        if not self.between_tasks(lambda: self.model.keep_share(share)):
            return
        if share != 1 and self.now.begun is None:
            return self.refused(lambda: self.model.keep_share(share), "not known how this task began")
        self.model.keep_share(share)
        self.kept(share)

    def kept(self, share):
        if share != 1:
            _, begun = self.now.begun
            self.now.up = [old + share * (up - old) for old, up in zip(begun, self.now.up, strict=True)]

    @rule(share=SHARES)
    def keep(self, share):
        if self.between_tasks(lambda: self.model.keep(share)):
            self.model.keep(share)
            self.now.finished, self.now.up = scaled(share, self.now.finished), scaled(share, self.now.up)
            self.now.began()

    # ------------------------------------------------------------ adapters

    @precondition(lambda self: len(self.adapters) < 3)
    @rule(fold=st.sampled_from(["weight", "factors"]))
    def add_adapter(self, fold):
        name = next(name for name in NAMES if name not in self.adapters)
        self.model.add_adapter(name, config(fold))
        self.note(name)

    @rule(data=st.data())
    def set_adapter(self, data):
        names = data.draw(st.lists(st.sampled_from(sorted(self.adapters)), min_size=1, max_size=2, unique=True))
        self.model.set_adapter(names[0])  # the name that PEFT's model goes on with
        self.model.base_model.set_adapter(names)
        self.active, self.merged = names, {}

    @precondition(lambda self: len(self.adapters) > 1)
    @rule(data=st.data())
    def delete_adapter(self, data):
        name = data.draw(st.sampled_from(sorted(self.adapters)))
        if name in self.merged:
            return
        self.model.delete_adapter(name)
        del self.adapters[name]
        left = [other for other in self.active if other != name]
        self.active = left or list(self.model.active_adapters)  # PEFT chooses
        assert set(self.active) <= set(self.adapters)

    @precondition(lambda self: 1 < len(self.adapters) < 3)
    @rule(first=st.floats(-1, 1), second=st.floats(-1, 1))
    def add_weighted_adapter(self, first, second):
        names = sorted(self.adapters)
        new = next(name for name in NAMES if name not in self.adapters)
        self.model.add_weighted_adapter(names, [first, second], new, "cat")
        wholes = [self.adapters[name].whole for name in names]
        self.note(new)
        self.adapters[new].finished = [first * a + second * b for a, b in zip(*wholes, strict=True)]

    # ------------------------------------------------------------ merging, disabling, blocks

    @rule(safe=st.booleans())
    def merge(self, safe):
        self.model.merge_adapter(safe_merge=safe)
        for name in self.active:
            self.merged.setdefault(name, self.adapters[name].whole)

    @rule()
    def unmerge(self):
        self.model.unmerge_adapter()
        self.merged = {}

    @rule()
    def disable(self):
        with self.model.disable_adapter():
            self.check([])
        self.merged = {}  # a pass of the base model unmerges, in PEFT too

    @rule(scale=SHARES)
    def blocks(self, scale):
        model = self.model
        calls = {
            "scaled": (lambda: model.scaled(scale), lambda now: [scaled(scale, now.whole)]),
            "history": (lambda: model.scaled_history(scale), lambda now: [scaled(scale, now.finished), now.modes]),
            "previous": (model.previous_task, lambda now: [now.finished]),
            "held": (model.held_weights, lambda now: [now.whole]),
        }
        for name, (enter, updates) in calls.items():
            if self.between_tasks(enter):
                with enter():
                    self.check(updates(self.now))
                    # Nothing is held at scale 1, or if there are no folded weights.
                    if name not in ("held", "scaled" if scale == 1 else ""):
                        self.refused(model.fold_task, "a block is running")

    @rule(seed=SEEDS)
    def train_inside(self, seed):
        if self.between_tasks(self.model.held_weights):
            with self.model.held_weights():
                self.train(seed, through_data=True)
                self.check()

    @rule(data=st.data())
    def rows(self, data):
        names = data.draw(st.lists(st.sampled_from([*sorted(self.adapters), "__base__"]), min_size=4, max_size=4))
        if self.merged:
            return self.refused(lambda: self.model(X, adapter_names=names), "merged")
        got = self.model(X, adapter_names=names).detach().double()
        for row, name in enumerate(names):
            update = [] if name == "__base__" else [self.adapters[name].whole]
            torch.testing.assert_close(got[row], self.expected(update, X[row]), rtol=2e-5, atol=2e-5)

    # ------------------------------------------------------------ copies and files

    @rule(how=st.sampled_from([copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]))
    def copy(self, how):
        self.model = how(self.model)

    @rule()
    def whole_state(self):
        """What `torch.save(model.state_dict())` and loading it into the same model do."""
        self.model.load_state_dict(copy.deepcopy(self.model.state_dict()))
        self.merged = {}
        for adapter in self.adapters.values():
            adapter.begun = None

    @rule(data=st.data())
    def weights_of_another(self, data):
        source, target = (data.draw(st.sampled_from(sorted(self.adapters))) for _ in range(2))
        state = copy.deepcopy(get_peft_model_state_dict(self.model, adapter_name=source))
        set_peft_model_state_dict(self.model, state, adapter_name=target)
        self.taken(source, target)

    def taken(self, source, target):
        if target in self.merged or target not in self.adapters:  # a new one is added, for which PEFT unmerges
            self.merged = {}
        self.adapters[target] = copy.deepcopy(self.adapters[source])
        self.adapters[target].begun = None

    @rule(data=st.data(), fresh=st.booleans())
    def save_and_load(self, data, fresh):
        source = data.draw(st.sampled_from(sorted(self.adapters)))
        with tempfile.TemporaryDirectory() as place:
            self.model.save_pretrained(place, selected_adapters=[source])
            folder = Path(place) if source == "default" else Path(place, source)
            if fresh:
                self.model = PeftModel.from_pretrained(base(), folder, is_trainable=True).eval()
                self.adapters, self.active, self.merged = {"default": self.adapters[source]}, ["default"], {}
                self.adapters["default"].begun = None
                return
            target = data.draw(st.sampled_from(NAMES))
            self.model.load_adapter(folder, target, is_trainable=True)
            self.taken(source, target)
            self.active = list(self.model.active_adapters)
            self.model.eval()

    @rule()
    def move(self):
        """Rounding to bfloat16 and back would change values; to float64 and back does not."""
        self.model.double()
        got = self.model(X.double()).detach()
        torch.testing.assert_close(got, self.expected(self.acting()), rtol=2e-5, atol=2e-5)
        self.model.float()

    def teardown(self):
        if hasattr(self, "model"):
            pristine, found = base().state_dict(), self.model.unload().state_dict()
            assert found.keys() == pristine.keys()
            assert all(torch.equal(value, pristine[name]) for name, value in found.items())


Case = Sequences.TestCase
Case.settings = settings(
    max_examples=30,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],  # without shrinking, which takes minutes
)


@pytest.mark.filterwarnings("ignore")
class TestSequences(Case):
    pass


del Case
