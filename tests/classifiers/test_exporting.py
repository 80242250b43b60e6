"""Graphs of a head, and of a tower with a head: torch.export, ONNX and torch.compile."""

import adapted_clip
import pytest
import torch
from adapted_clip import CONFIG, PIXELS, shallow
from peft import get_peft_model
from reference import randn
from torch import nn

from dulbe_peft import BridgeEnsembleHead, DualModeLoraConfig

FEATURES = randn(6, 16, seed=4)


@pytest.fixture
def head():
    head = BridgeEnsembleHead(16)
    head.add_classes(["a", "b", "c"], randn(9, 16, seed=1), torch.arange(9) % 3, randn(3, 16, seed=2))
    return head.eval()


class Whole(nn.Module):
    """An adapted tower and a head, which map pixels to logits."""

    def __init__(self, model, head):
        super().__init__()
        self.model, self.head = model, head

    def forward(self, pixels):
        return self.head(self.model.get_image_features(pixel_values=pixels).pooler_output)


@pytest.fixture(params=["head", "head with tower"])
def case(request, head, tiny_clip):
    if request.param == "head":
        return head, FEATURES
    model = adapted_clip.learned(get_peft_model(shallow(tiny_clip()), DualModeLoraConfig(**CONFIG)))
    return Whole(model, head).eval(), PIXELS


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
def test_torch_export_equals_the_module(case, strict):
    module, inputs = case
    if strict and isinstance(module, Whole):
        pytest.skip("torch warns about transformers' forward pass")
    with torch.no_grad():
        expected = module(inputs)
        rows = {0: torch.export.Dim("rows", min=2)} if isinstance(module, BridgeEnsembleHead) else None
        program = torch.export.export(module, (inputs,), dynamic_shapes=(rows,), strict=strict)
        close(program.module()(inputs), expected)
        if rows:
            close(program.module()(inputs[:4]), expected[:4])


@pytest.mark.rare
@pytest.mark.filterwarnings("ignore")  # torch's exporter emits deprecation warnings
def test_onnx_export_equals_the_module(case, tmp_path):
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    module, inputs = case
    torch.onnx.export(module, (inputs,), dynamo=True, verbose=False).save(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    (actual,) = session.run(None, {session.get_inputs()[0].name: inputs.numpy()})
    with torch.no_grad():
        close(torch.from_numpy(actual), module(inputs))


@pytest.mark.slow
def test_compiled_graph_equals_the_module(case):
    module, inputs = case
    torch.compiler.reset()
    with torch.no_grad():
        close(torch.compile(module, backend="eager", fullgraph=True)(inputs), module(inputs))


def test_values_are_checked_outside_graphs(head):
    with pytest.raises(ValueError, match="row 1 contains NaN"):
        head(torch.stack([FEATURES[0], FEATURES[0] * float("nan")]))
