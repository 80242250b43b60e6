"""Test the command line, in this process or, where necessary, in a separate one."""

import csv
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
import yaml
from processes import run
from small_runs import MACHINE, parse

import dulbe_peft
from dulbe_peft import STRATEGIES, ClassIncrementalLearner
from dulbe_peft.adapter.config import DualModeLoraConfig
from dulbe_peft.encoders.registry import demo_model_folder
from dulbe_peft.photos.commands.main import commands, main
from dulbe_peft.photos.commands.run import print_results
from dulbe_peft.photos.report import read_run
from dulbe_peft.photos.runs.run_settings import GROUPS, RunSettings, given_settings, pick, validated
from dulbe_peft.photos.runs.setup import open_source, stream_tasks
from dulbe_peft.utils.settings import field_types

SAVED = Path(__file__).parents[2] / "saved" / "0.3.0" / "frozen"
MODEL = str(demo_model_folder())
KEYS = ["--target-modules", "k_proj,v_proj"]
QUICK = ["--epochs", "1", "--residual-rank", "2", "--support-rank", "8", "--device", "cpu", "--no-progress"]


def test_errors_of_the_data_are_raised_before_a_model_is_loaded(folders, tmp_path, monkeypatch, capsys):
    import dulbe_peft.encoders.loading as loading

    (tmp_path / "order.txt").write_text("nobody\n")
    monkeypatch.setattr(loading, "load_dual_encoder", None)
    argv = ["run", "--model", MODEL, "--data", str(folders), "--output", str(tmp_path / "out"), "--no-store"]
    argv += ["--images-per-class", "2"]
    for strategy in ("frozen", "dulbe"):
        assert main([*argv, "--strategy", strategy, "--class-order", str(tmp_path / "order.txt")]) == 2
        assert "nobody" in capsys.readouterr().err


@pytest.fixture(scope="module")
def folders(digit_folders):
    return digit_folders(4, 5, 3)


def settings_from(*argv):
    flags = parse(list(argv))
    return given_settings(flags.pop("config"), flags)


def next_command(captured):
    """Return the command that the last line of the output suggests."""
    return captured.out.splitlines()[-1].removeprefix("next: dulbe-peft ")


@pytest.mark.slow
def test_run_follows_the_recommended_defaults(folders, tmp_path, capsys, monkeypatch):
    """Nothing is trained, all classes are one task, and --classifier chooses the classifier that predicts."""
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--model", MODEL, "--data", str(folders), "--output", "out", *MACHINE]) == 0
    lines = capsys.readouterr().out.splitlines()
    results = json.loads(Path("out/results.json").read_text())
    assert results["strategy"] == {"name": "frozen"} and results["class_names"] == [["one", "three", "two", "zero"]]
    assert next(iter(results["classifiers"])) == "bayes" == STRATEGIES["frozen"].classifiers[0]
    assert any(line.startswith("accuracy estimated from 20 training images, each left out in turn") for line in lines)
    assert not any("forgetting" in line for line in lines) and lines[-1] == "next: dulbe-peft report out"
    images = [str(path) for path in sorted((folders / "test").rglob("*.png"))]
    loaded = ClassIncrementalLearner.from_pretrained("out")
    rows = loaded.classifiers["lda"].probabilities(loaded.image_embeds(images)).max(dim=1)
    assert main(["predict", "out", *images, "--classifier", "lda", "--csv", "-", *MACHINE]) == 0
    _, *table = csv.reader(capsys.readouterr().out.splitlines())
    assert [row[1] for row in table] == [loaded.class_names[label] for label in rows.indices]
    assert [float(row[2]) for row in table] == pytest.approx(rows.values.tolist(), abs=1e-5)
    assert main(["evaluate", "out", "--data", str(folders), "--classifier", "lda", *MACHINE]) == 0
    assert next(iter(json.loads(capsys.readouterr().out)["classifiers"])) == "lda"
    assert main(["export", "out", "model", "--format", "transformers", "--classifier", "lda", *MACHINE]) == 0
    assert "lda" in Path("model/README.md").read_text()
    assert next_command(capsys.readouterr()) == "serve out --device cpu --no-progress"
    assert main(["report", "out"]) == 0
    assert next_command(capsys.readouterr()) == "predict out PHOTOS"


def test_run_evaluate_and_export_work_together(folders, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = {"increment": 2, "prompt_template": "a photo of the digit {}.", "epochs": 3, "strategy": "dulbe"}
    Path("run.yaml").write_text(yaml.safe_dump(settings))
    command = ["run", "--config", "run.yaml", "--model", MODEL]
    assert main([*command, "--data", str(folders), "--output", "out", *QUICK]) == 0
    printed = capsys.readouterr().out
    assert "task 2/2: 4 classes" in printed and "\npooled_bridge  " in printed
    results = json.loads(Path("out/results.json").read_text())
    arguments = results["configuration"]["arguments"]
    assert (arguments["epochs"], arguments["prompt_template"]) == (1, settings["prompt_template"]), (
        "the flag overrides the file"
    )
    assert results["class_names"] == [["one", "three"], ["two", "zero"]]
    assert main(["evaluate", "out/task-002", "--data", str(folders)]) == 0
    captured = capsys.readouterr()
    figures = json.loads(captured.out)
    assert "  text  " in captured.err, "the baseline is listed with the classifiers"
    assert figures["accuracy"] == pytest.approx(results["head"]["last_accuracy"]) and figures["num_classes"] == 4
    assert main(["export", "out", "lora"]) == 0
    assert json.loads(Path("lora/adapter_config.json").read_text())["peft_type"] == "LORA"
    assert main(["export", "out", "short", "--compress-to", "2"]) == 0
    report = json.loads(Path("short/compression.json").read_text())
    assert f"relative error {report['relative_error']:.2e} over all layers" in capsys.readouterr().out


@pytest.mark.slow
def test_strategies_and_classifiers_are_flags(folders, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = ["run", "--model", MODEL, "--data", str(folders), "--increment", "2", *MACHINE]
    again = [*base, "--output", "out", "--classifiers"]
    assert main([*again, "ranpac:features=64,seed=1,lda"]) == 0
    printed = capsys.readouterr().out
    assert "\nranpac  " in printed and "\nlda  " in printed and "bridge" not in printed
    assert json.loads(Path("out/task-002/learner.json").read_text())["classifiers"] == ["ranpac", "lda"]
    written = Path("out/results.json").read_text()
    assert list(json.loads(written)["classifiers"]) == ["ranpac", "lda"] and read_run("out").first == "ranpac"

    assert main(["evaluate", "out/task-001", "--data", str(folders)]) == 0
    captured = capsys.readouterr()
    figures = json.loads(captured.out)
    assert figures["not_learned"] == {"classes": ["two", "zero"], "num_images": 6} and figures["num_classes"] == 2
    assert "not learned: two, zero (6 images)" in captured.err and f"{100 * figures['accuracy']:.2f} %" in captured.err
    assert main(["evaluate", "out", "--data", str(folders / "test")]) == 0
    assert json.loads(capsys.readouterr().out)["num_classes"] == 4  # a folder of classes, and the run's newest task
    with monkeypatch.context() as context:
        context.setattr(sys.stdout, "isatty", lambda: True)  # at a terminal, only the summary is printed
        assert main(["evaluate", "out/task-001", "--data", str(folders)]) == 0
    assert capsys.readouterr() == ("", captured.err)

    for command, words in (
        (["export", "out", "lora", "--format", "lora"], "has no adapter to export"),
        ([*again, "lda"], "classifiers was 'lda, ranpac' and is now 'lda'"),
    ):
        assert main(command) == 2 and words in capsys.readouterr().err
    with monkeypatch.context() as context:  # wrong names are refused before anything is opened, loaded or moved
        context.setattr("dulbe_peft.photos.runs.setup.open_source", None)
        for flag, value, words in (
            ("--strategy", "frosen", "did you mean 'frozen'"),
            ("--classifiers", "lda,bayes:kapa=4", "'bayes' classifier has no setting 'kapa'; did you mean"),
        ):
            assert main([*base, flag, value, "--output", "out", "--overwrite"]) == 2
            assert words in capsys.readouterr().err and Path("out/task-002").is_dir()
    assert main([*again, "lda", "--overwrite"]) == 0
    assert "renamed the existing out to out.old" in capsys.readouterr().err and Path("out.old/task-002").is_dir()
    assert main([*base, *QUICK, "--strategy", "bofa", "--output", "bofa", "--increment", "4"]) == 0
    adapter = json.loads(Path("bofa/task-001/adapter_config.json").read_text())
    assert adapter["target_modules"] == ["visual_projection"]  # the strategy's default


def test_class_order_is_read_from_a_file(folders, tmp_path):
    """The file has names, or numbers of the classes in sorted order: one, three, two, zero."""
    for order in ("two\none\n\nthree\nzero\n", "2\n0\n1\n3"):
        (tmp_path / "order.txt").write_text(order)
        argv = ["run", "--data", str(folders), "--increment", "1", "--class-order", str(tmp_path / "order.txt")]
        source, _, stream, *_ = RunSettings.of(settings_from(*argv))
        tasks = stream_tasks(open_source(source), stream)
        assert [task.class_names for task in tasks] == [("two",), ("one",), ("three",), ("zero",)]


def test_second_word_after_a_list_says_that_commas_are_meant(capsys):
    for words, hint in (
        (["--target-modules", "q_proj", "k_proj", "--epochs", "1"], "--target-modules q_proj,k_proj."),
        (["--classifiers", "lda", "text", "bayes"], "--classifiers lda,text,bayes."),
    ):
        assert main(["run", "--data", "x", *words]) == 2
        assert f"Write several values of {words[0]} with commas: {hint}" in capsys.readouterr().err
    assert main(["run", "--data", "x", "--model", "a", "b"]) == 2
    assert "commas" not in capsys.readouterr().err


def test_flags_and_yaml_accept_the_same_values(tmp_path):
    flags = ["run", "--target-modules", r".*\.fc1", "--layers-pattern", "layers", "--no-init-weights"]
    settings = settings_from(*flags, "--layers-to-transform", "1,2", "--text-target-modules", "fc1,fc2")
    assert settings["target_modules"] == r".*\.fc1" and settings["init_weights"] is False
    assert settings["layers_to_transform"] == [1, 2] and settings["text_target_modules"] == ["fc1", "fc2"]
    (tmp_path / "run.yaml").write_text("target_modules: k_proj,v_proj\nclassifiers: [bridge, 'lda:shrinkage=0.1']\n")
    listed = settings_from("run", "--config", str(tmp_path / "run.yaml"))
    assert listed == settings_from("run", *KEYS, "--classifiers", "bridge,lda:shrinkage=0.1")
    assert pick(DualModeLoraConfig, listed).target_modules == ["k_proj", "v_proj"]
    (tmp_path / "run.yaml").write_text("learning_rate: 1e-3\nprecision: float32\nstore: no\nmodel: x\nseed: 3\n")
    _, model, _, _, args = validated(settings_from("run", "--config", str(tmp_path / "run.yaml")))
    assert (args.learning_rate, args.precision, args.seed, model.store) == (1e-3, "float32", 3, False)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("", "dulbe-peft: Missing command.  See dulbe-peft --help"),
        ("predcit", "dulbe-peft: No such command 'predcit'. Did you mean 'predict'?"),
        ("run --model m --data d --output o --images-per-class 2,x", "must be like 8, or 2,32, or longtail:32"),
        ("run --model /no/such/model --dry-run", "'/no/such/model' does not exist"),
        ("predict june photo.jpg", "june is not a saved learner, because it has no manifest.json: pass a run's"),
        ("predict july photo.jpg", "july is a file, not a saved learner: pass a run's folder"),
        ("run --model demo --data hf: --output o", "hf: names no dataset: expected hf:NAME"),
        ("run --model m --data d --output o --class-names ''", "class_names is '', expected the path of a file"),
        ("run --config '{model: m, data: d, output: o, class_texts: \"\"}'", "class_texts is '', expected the path"),
        ("run --config= --model m --dry-run", "configuration file '.' does not exist"),
        (
            "features --model demo --data demo-digits --split test --output o --class-names ''",
            "class_names is '', expected the path of a file",
        ),
        (f"predict {SAVED} photos --sort-into ''", "--sort-into is '', expected the path of a folder"),
        ("check demo-digits --page ''", "--page is '', expected the path of a .html file"),
        ("run --config 'epoch: 3'", "unknown setting 'epoch'; did you mean 'epochs'?"),
        ("run --config '- 1'", "must map names to values"),
        ("run --config '!!python/object/apply:os.abort []'", "is not YAML"),
        ("run --config '&a [*a, 1]'", "must map names to values"),
    ],
)
def test_wrong_input_prints_one_line_and_exits_with_2(argv, words, capsys, tmp_path, monkeypatch):
    """The last word of a row with --config is the content of the file; the Hub is not asked for anything."""
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("the Hub was asked"))
    monkeypatch.chdir(tmp_path)
    Path("june").mkdir()
    Path("july").touch()
    Path("photo.jpg").touch()
    given = shlex.split(argv)
    if "--config" in given:
        (tmp_path / "bad.yaml").write_text(given[-1])
        given[-1] = "bad.yaml"
    assert main(given) == 2
    error = capsys.readouterr().err
    assert words in error and (error.count("\n") == 1 or "YAML" in words) and error.startswith("dulbe-peft")


@pytest.mark.parametrize(
    ("argv", "number", "status"),
    [
        (["--data", "my photos", "--prompt-template", "it's a {}.", "--overwrite"], signal.SIGINT, 130),
        (["--data", "d", "--config", "some.yaml"], signal.SIGTERM, 143),
    ],
)
def test_stopped_run_prints_the_command_that_continues_it(argv, number, status, capsys, tmp_path, monkeypatch):
    """The signal comes while the model is loaded; afterwards the earlier handler of the signal is restored."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some.yaml").write_text("seed: 1")
    (tmp_path / argv[1] / "cat").mkdir(parents=True)
    argv = ["run", *argv, "--model", "demo", "--output", "o"]
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("dulbe_peft.photos.runs.setup.set_up", lambda *_: signal.raise_signal(number))
    assert main(argv) == status and signal.getsignal(signal.SIGTERM) is before
    first, second, command = capsys.readouterr().err.splitlines()
    assert first == f"dulbe-peft: stopped by {number.name}" and "finished tasks are kept" in second
    again = [word for word in argv if word != "--overwrite"]  # it would move the finished tasks away
    assert shlex.split(command) == [sys.executable, "-m", "dulbe_peft", *again]


def test_error_caused_by_sigterm_is_reported_as_sigterm(capsys, monkeypatch):
    """A scheduler sends SIGTERM to the processes that read images as well, and the death of one raises an error."""

    def call():
        try:
            signal.raise_signal(signal.SIGTERM)
        except SystemExit:
            raise ChildProcessError("a process that reads images died") from None

    monkeypatch.setattr("dulbe_peft.utils.folders.library_versions", call)
    assert main(["env"]) == 143
    assert capsys.readouterr().err == "dulbe-peft: stopped by SIGTERM\n"


def test_env_and_version_print_versions(capsys):
    assert main(["env"]) == main(["--version"]) == 0
    printed = capsys.readouterr().out
    assert "torch: " in printed and printed.endswith(f"dulbe_peft {dulbe_peft.__version__}\n")


@pytest.mark.slow
def test_demo_prints_the_accuracy_of_three_months(tmp_path, capsys):
    output = tmp_path / "demo"
    assert main(["demo", "--output", str(output)]) == 0
    printed, results = capsys.readouterr().out, json.loads((output / "results.json").read_text())
    first, *_, last = next(iter(results["classifiers"].values()))["matrix"]
    assert len(last) == 3 and min(last) > 0.9 > results["zero_shot"]["last_accuracy"]
    assert f"January brought zero, one, two, three: {100 * first[0]:.1f} % are classified correctly\n" in printed
    assert f"March brought seven, eight, nine: {100 * last[2]:.1f} % are classified correctly; of January's" in printed
    assert f"next: open {output}/report.html in a browser" in printed
    assert "next: dulbe-peft check YOUR-FOLDER" in printed
    assert "nearest:" in (output / "report.html").read_text(encoding="utf-8")


@pytest.mark.rare
def test_demo_compares_training_with_a_frozen_model(tmp_path):
    command = [sys.executable, "-m", "dulbe_peft", "demo", "--compare", "--output", str(tmp_path / "demo")]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path).stdout
    results = json.loads((tmp_path / "demo" / "results.json").read_text())
    assert results["zero_shot"]["last_accuracy"] > 0.5 and results["head"]["last_accuracy"] > 0.9
    assert "before any training" in printed and "task 5/5" in printed and "\nfrozen bayes " in printed
    assert (tmp_path / "demo" / "accuracy.png").read_bytes().startswith(b"\x89PNG")


def test_help_fits_a_screen_and_help_all_shows_all_settings(capsys):
    for command, about in commands.lines.items():
        assert main([command, "--help"]) == 0
        text = capsys.readouterr().out
        assert len(text.splitlines()) <= 60 and max(map(len, text.splitlines())) <= 120, command
        assert about[0].upper() + about[1:] in " ".join(text.split())
    texts = []
    for flag in ("--help", "--help-all", "--help"):
        assert main(["run", flag]) == 0
        texts.append(capsys.readouterr().out)
    assert "example:" in texts[0] and "--help-all" in texts[0] and "--structure-weight" not in texts[0] == texts[2]
    for name in (name for kind in GROUPS.values() for name in field_types(kind)):
        assert "--" + name.replace("_", "-") in texts[1]


def test_run_and_report_recommend_by_the_estimate_not_the_tests(run_copy, capsys):
    for task in run_copy.glob("task-*"):  # a task's files would not match the changed results
        shutil.rmtree(task)
    file, printed = run_copy / "results.json", []
    results = json.loads(file.read_text())
    for share in (0.8, 0.55):
        shares = {"bridge": [0.5, 0.4, 0.6], "lda": [share, share - 0.1, share + 0.1]}
        results["estimates"] = {"images": 40, "classes": [*chain(*results["class_names"])], "shares": shares}
        for name, accuracy in (("bridge", 1.0), ("lda", 0.0)):
            results["classifiers"][name]["last_accuracy"] = accuracy
        file.write_text(json.dumps(results))
        print_results(str(run_copy))
        assert main(["report", str(run_copy)]) == 0
        printed.append(capsys.readouterr().out)
    clear, chance = printed
    assert (
        "accuracy estimated from 40 training images, each left out in turn, with 95 % intervals: lda 80.0 % (70.0 to"
        in clear
    )
    assert clear.endswith(f"predict {run_copy} PHOTOS --classifier lda\n")
    assert "estimate of lda is 5.0 points higher, which may be chance" in chance
    assert chance.endswith(f"predict {run_copy} PHOTOS\n")


def test_files_of_another_kind_are_replaced_only_with_overwrite(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for flag, name in (("--output", "notes.txt"), ("--csv", "photo.jpg"), ("--latex", "results.json")):
        Path(name).write_text("precious")
        assert main(["report", "out", flag, name]) == 2
        assert "choose another name" in capsys.readouterr().err and Path(name).read_text() == "precious"
    assert main(["report", "out", "--latex", "results.json", "--overwrite"]) == 2, "a run needs this file"
    for old in ("notes.txt.old", "notes.txt.old1"):
        Path("notes.txt").write_text(old)
        assert main(["check", "demo-digits", "--page", "notes.txt", "--overwrite"]) == 0
        assert Path(old).read_text() == old and "<html" in Path("notes.txt").read_text(encoding="utf-8")
    assert next_command(capsys.readouterr()).startswith("run --model ")
    assert main(["demo", "--output", ".", "--overwrite"]) == 2
    assert "which the command uses" in capsys.readouterr().err
    monkeypatch.setattr(os, "access", lambda *_: False)
    for argv in ("demo", "run --model demo --data demo-digits --output x/y"):
        assert main(argv.split()) == 2
        assert capsys.readouterr().err == f"dulbe-peft: {tmp_path} cannot be written to: choose another --output\n"


def test_shell_completes_commands_and_flags():
    for words, completion in (
        ("dulbe-peft pre", "plain,predict"),
        ("dulbe-peft predict --cl", "plain,--classifier"),
        ("dulbe-peft run --help-all --classi", "plain,--classifiers"),
    ):
        given = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" ")), "_DULBE_PEFT_COMPLETE": "bash_complete"}
        command = [sys.executable, "-m", "dulbe_peft"]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | given)
        assert done.stdout == f"{completion}\n", done.stderr


@pytest.mark.slow
def test_closed_pipe_ends_the_command_quietly():
    closed, pipe = os.pipe()
    os.close(closed)
    done = run("-m", "dulbe_peft", "env", stdout=pipe)
    os.close(pipe)
    assert done.returncode == 141 and done.stderr == ""
