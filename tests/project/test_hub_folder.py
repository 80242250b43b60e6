"""The folder `hub/`: a model card whose figures were measured, and a Space, which runs if gradio is installed."""

import runpy
from pathlib import Path

import pytest
import yaml

from dulbe_peft.data.readers import load_data
from dulbe_peft.encoders.registry import demo_model_folder

HUB = Path(__file__).parents[2] / "hub"


def parts_of(path):
    """Return the front matter and the text of a card."""
    _, front, text = path.read_text(encoding="utf-8").split("---\n", 2)
    return yaml.safe_load(front), text


def test_hub_card_has_the_figures_of_the_packaged_model():
    front, text = parts_of(HUB / "model" / "README.md")
    packaged, measured = parts_of(demo_model_folder() / "README.md")
    assert (front["license"], front["pipeline_tag"]) == (packaged["license"], packaged["pipeline_tag"])
    metrics = front["model-index"][0]["results"][0]["metrics"]
    for metric in metrics:
        kind = metric["name"].removesuffix(", %")
        row = f"| scikit-learn's handwritten digits, {kind} | {metric['value']} |"
        assert row in text and row in measured
    assert "447,521 parameters" in text and "447,521 parameters" in measured


def test_space_teaches_and_answers_over_http(tmp_path):
    """Send requests to its HTTP address, as a browser does."""
    pytest.importorskip("gradio", reason="gradio needs another version of Pillow: see hub/README.md")
    client = pytest.importorskip("gradio_client")
    space = runpy.run_path(str(HUB / "space" / "app.py"))
    digits, files = load_data("demo-digits", "train"), {}
    for label, name in ((0, "zero"), (1, "one")):
        rows = [row for row, digit in enumerate(digits.labels) if digit == label][:6]
        files[name] = [str(tmp_path / f"{name}{row}.png") for row in rows]
        for row, path in zip(rows, files[name], strict=True):
            digits[row]["image"].save(path)
    _, address, _ = space["page"].launch(prevent_thread_lock=True, quiet=True)
    try:
        page = client.Client(address, verbose=False)
        for name, paths in files.items():
            answer = page.predict([client.handle_file(path) for path in paths[:-1]], name, api_name="/teach")
        assert answer == "It knows 2 classes: zero, one."
        for name, paths in files.items():
            assert page.predict(client.handle_file(paths[-1]), api_name="/ask")["label"] == name
        assert page.predict(api_name="/digits").startswith("It knows 10 classes: ")
        with pytest.raises(Exception, match="Choose some images"):
            page.predict([], "two", api_name="/teach")
    finally:
        space["page"].close()
