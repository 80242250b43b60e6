"""Test that no flag of `run` is accepted and does nothing if the run in the folder is finished or was interrupted."""

import shutil
import warnings

import pytest
from lives import content
from small_runs import MACHINE

from dulbe_peft.photos.commands.main import commands, main

# A value for each flag that differs from that of the run.
VALUES = {
    "train_split": "test",
    "test_split": "none",
    "test_fraction": "0.3",
    "test_data": "{other}",
    "class_names": "{names}",
    "vocabulary": "{names}",
    "image_column": "picture",
    "label_column": "species",
    "path_column": "photo",
    "leave_out": "two",
    "one_label": None,
    "machine_labels": None,
    "validation_fraction": "0.4",
    "images_per_class": "2",
    "test_images_per_class": "1",
    "draw_seed": "3",
    "group": "(.)[.]png$",
    "group_seconds": "5",
    "model": "demo",
    "strategy": "lora",
    "classifiers": "lda",
    "increment": "1",
    "initial_increment": "1",
    "class_order": "{order}",
    "order_seed": "3",
    "class_texts": "{texts}",
    "shared_rank": "1",
    "residual_rank": "3",
    "support_rank": "9",
    "structure_weight": "0.5",
    "class_temperature": "0.5",
    "instance_temperature": "0.5",
    "target_modules": "fc1",
    "exclude_modules": "fc2",
    "text_rank": "1",
    "text_alpha": "3",
    "text_target_modules": "fc1",
    "init_weights": None,
    "layers_to_transform": "0",
    "layers_pattern": "layers",
    "fold": "factors",
    "modules_to_save": "x",
    "update_share": "0.02",
    "planning_images": "7",
    "epochs": "2",
    "batch_size": "3",
    "learning_rate": "0.1",
    "lr_schedule": "epoch",
    "kl_reduction": "batchmean",
    "teacher": "online",
    "statistics_tokens": "cls",
    "prompt_template": "one {}.",
    "training_template": "one {}.",
    "class_name_style": "spaces",
    "image_resize": "squash",
    "whole_images": None,
    "features": "unprojected",
    "augment": "flip",
    "copies": "2",
    "text_embeds": "at_introduction",
    "drift": "linear",
    "seed": "5",
    "revision": "main",
}
# Flags that change where, how fast or with which messages a run is computed, and not what is learned.
OF_THE_MACHINE = {
    *("help_all", "config", "labels", "overwrite", "data", "output", "strict", "dry_run", "store", "num_workers"),
    *("eval_batch_size", "pixel_cache_mb", "device", "precision", "backend", "force", "torch_compile", "profile"),
    *("log_with", "progress", "attn_implementation"),
}


@pytest.fixture(scope="module")
def run(digit_folders, tiny_model, tmp_path_factory):
    """Return the command of a finished run over three digits, its folder, and the files for `VALUES`."""
    root = tmp_path_factory.mktemp("finished")
    data = digit_folders(3, 4, 2)
    (root / "names.txt").write_text("uno\ntres\ndos\n")
    (root / "order.txt").write_text("two\nzero\none\n")
    (root / "texts.yaml").write_text("one: [the number one]\n")
    files = {
        "other": data / "train",
        "names": root / "names.txt",
        "order": root / "order.txt",
        "texts": root / "texts.yaml",
    }
    base = ["run", "--model", str(tiny_model), "--data", str(data), "--increment", "2", "--classifiers", "prototype"]
    assert main([*base, *MACHINE, "--output", str(root / "out")]) == 0
    return base, root / "out", {name: str(path) for name, path in files.items()}


def test_every_flag_has_a_value_or_belongs_to_the_machine():
    names = {parameter.name for parameter in commands.get_command(None, "run").params}
    assert names == {*VALUES} | OF_THE_MACHINE


@pytest.mark.slow
@pytest.mark.parametrize("state", ["finished", "interrupted"])
def test_each_flag_is_refused_or_acts(run, tmp_path, capsys, monkeypatch, state):
    monkeypatch.setattr("dulbe_peft.photos.report.pictures.write_pictures", lambda *_: None)  # which no flag changes
    base, out, files = run
    silent, status = dict[str, str](), 0
    for name, value in VALUES.items():
        if status == 0:  # the run of the flag before was continued
            folder = shutil.copytree(out, tmp_path / name)
            if state == "interrupted":
                shutil.rmtree(folder / "task-002")
            before = content(folder)
        flag = [f"--{name.replace('_', '-')}"]
        flag += [] if value is None else [files.get(value.strip("{}"), value)]
        rest = [word for word in base if word != "--model" and word != base[2]] if name == "model" else base
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            status = main([*rest, *flag, *MACHINE, "--output", str(folder)])
        said = capsys.readouterr().err
        assert "Invalid value" not in said and "unexpected" not in said, "a value that no run takes tells nothing"
        if status == 0 and f"{flag[0]} has no effect" not in said:
            silent[name] = said[-200:]
        assert status == 0 or content(folder) == before, name
    assert not silent
