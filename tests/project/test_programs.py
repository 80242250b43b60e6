"""The page for users of LoRA and the notebooks run, and what they say holds."""

import json
import re
import runpy
import tempfile

import pytest
import torch
from documents import ROOT, blocks, split_numbers, text_of
from peft import LoraConfig, get_peft_model

from dulbe_peft import DualModeLoraConfig, load_clip

FROM_LORA = "docs/from-lora.md"
NOTEBOOK = "examples/training.ipynb"
VISION, TEXT = "base_model.model.vision_model.", "base_model.model.text_model."


def trained(config):
    """Return the size of every trained tensor that a configuration adds to the demo model, by name."""
    model = get_peft_model(load_clip("demo")[0], config)
    return {name: value.numel() for name, value in model.named_parameters() if value.requires_grad}


def block_indices(names):
    return {int(index) for name in names for index in re.findall(r"\.layers\.(\d+)\.", name)}


@pytest.mark.slow
def test_program_of_the_page_for_lora_users_trains_saves_and_exports(elsewhere):
    namespace: dict = {"__name__": "__main__"}
    for number, (_, _, code) in enumerate(blocks(FROM_LORA, "python"), 1):
        exec(compile(code, f"{FROM_LORA} block {number}", "exec"), namespace)
    model, pixels = namespace["model"], torch.rand(4, 3, 16, 16)

    def features(adapted):
        with torch.no_grad():
            return adapted.get_base_model().get_image_features(pixel_values=pixels).pooler_output

    changed = (features(model) - features(namespace["lora"])).abs().max()
    assert torch.equal(features(namespace["again"]), features(model))
    # The export adds the same update in another order: a thousand float32 roundings of the features.
    largest = features(model).abs().max()
    error = (features(namespace["served"]) - features(model)).abs().max()
    assert error <= 1000 * torch.finfo(torch.float32).eps * largest < changed
    assert model.base_model.history_rank == 2 * 9 and namespace["statistics"]
    assert (elsewhere / "dual" / "statistics.safetensors").is_file() and (elsewhere / "lora").is_dir()


def test_settings_on_the_page_for_lora_users_are_those_of_the_code():
    rows = re.findall(r"^\| (`.+?) \| (.+) \|$", text_of(FROM_LORA), flags=re.MULTILINE)[1:]
    assert len(rows) >= 9
    known = set(DualModeLoraConfig.__dataclass_fields__)
    for theirs, ours in rows:
        fields = [name.partition("=")[0] for name in re.findall(r"`([a-z_]+(?:=\w+)?)`", theirs)]
        assert fields and set(fields) <= set(LoraConfig.__dataclass_fields__), theirs
        for field in fields:
            if "not exist" in ours or ours.startswith("None"):
                with pytest.raises(TypeError, match=field):
                    DualModeLoraConfig(**{field: getattr(LoraConfig(), field)})
            elif ours.startswith("The same"):
                assert field in known
        for name, value in re.findall(r"`(\w+)=([\d.]+)`", ours):
            assert value == "0" or getattr(DualModeLoraConfig(), name) == float(value), name
    layers = re.search(r"^layers = (\[.+\])$", text_of(FROM_LORA), flags=re.MULTILINE)
    assert layers is not None
    ours = trained(DualModeLoraConfig())
    assert {name.split(".")[-3] for name in ours if name.startswith(VISION)} == set(json.loads(layers[1]))


def test_dual_modes_train_r_numbers_for_each_output_where_lora_trains_inputs_too():
    layers = ["k_proj", "v_proj", "fc1", "fc2"]
    ours = trained(DualModeLoraConfig(text_rank=0))
    lora = trained(LoraConfig(r=9, target_modules=layers))
    assert ours and all(name.startswith(VISION) for name in ours)
    of_outputs = sum(size for name, size in lora.items() if name.startswith(VISION) and ".lora_B." in name)
    assert sum(ours.values()) == of_outputs


def test_layers_to_transform_counts_vision_blocks_and_leaves_texts_alone():
    every, first = trained(DualModeLoraConfig()), trained(DualModeLoraConfig(layers_to_transform=[0]))
    assert block_indices(name for name in first if name.startswith(VISION)) == {0}
    assert [name for name in first if name.startswith(TEXT)] == [name for name in every if name.startswith(TEXT)]
    assert len(block_indices(name for name in first if name.startswith(TEXT))) > 1


@pytest.mark.slow
def test_notebook_runs_and_learns(elsewhere, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))
    cells = json.loads(text_of("examples/own_folder.ipynb"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)  # it is stored without outputs
    namespace: dict = {"__name__": "__main__"}
    for number, cell in enumerate(code, 1):
        exec(compile("".join(cell["source"]), f"own_folder.ipynb cell {number}", "exec"), namespace)
    learner, folder = namespace["again"], namespace["work"]
    assert learner.tasks == [("one", "two", "zero"), ("three",)] and folder.is_relative_to(elsewhere)
    best = [row[0][0] for row in namespace["answers"]]  # all these images show "three", which was learned last
    assert len(best) >= 5 and best.count("three") / len(best) > 0.8
    assert (folder / "exported" / "model.safetensors").is_file()


def printed_by(notebook):
    """Return what the cells of a notebook print, with their numbers."""
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return "".join(f"[{cell['execution_count']}]\n{''.join(text)}" for cell in code for text in texts_of(cell))


def texts_of(cell):
    return [output["text"] for output in cell["outputs"]] or [""]


@pytest.mark.slow
def test_stored_outputs_of_the_notebook_that_trains_are_those_of_its_cells(tmp_path):
    generate = runpy.run_path(str(ROOT / "docs" / "generate.py"))
    stored = json.loads(text_of(NOTEBOOK))
    words, numbers = split_numbers(printed_by(stored))
    now, numbers_now = split_numbers(printed_by(generate["with_cell_outputs"](stored, tmp_path)))
    assert now == words and len(numbers) > 40  # if this fails, run: python docs/generate.py notebooks
    assert numbers_now == pytest.approx(numbers, abs=5)  # processors round differently


@pytest.mark.slow
def test_notebook_that_trains_learns_a_folder_of_photographs(tmp_path, monkeypatch, digit_folders):
    monkeypatch.chdir(tmp_path)
    code = ["".join(cell["source"]) for cell in json.loads(text_of(NOTEBOOK))["cells"] if cell["cell_type"] == "code"]
    form = (
        code[1].replace('photos = ""', f"photos = {str(digit_folders(6, 6, 3))!r}").replace("epochs = 2", "epochs = 1")
    )
    assert form.count("\n") == code[1].count("\n") and form != code[1]
    namespace: dict = {"__name__": "__main__"}
    for number, cell in enumerate([code[0], form, *code[2:]], 1):
        exec(compile(cell, f"{NOTEBOOK} cell {number}", "exec"), namespace)
    assert [len(names) for names in namespace["learner"].tasks] == [2, 2] and len(namespace["tasks"]) == 2
    assert namespace["learner"].predict(namespace["image"]) in namespace["learner"].class_names
