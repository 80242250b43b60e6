"""Test `python -m research verify` on small models and images, with a stub for the Hub and the web."""

import hashlib
import io
import json
import random
import shutil
import tarfile
from importlib.metadata import version

import huggingface_hub
import numpy as np
import pytest
import reference
import torch
import yaml
from hub_stub import on_this_process
from PIL import Image
from tiny_encoders import save_encoder

from dulbe_peft.classifiers import make_classifier
from dulbe_peft.data.augmentation import augmented
from dulbe_peft.encoders.loading import load_dual_encoder, pixel_values, unit_image_embeds
from dulbe_peft.encoders.pixels import with_image_resize
from research.__main__ import run as main
from research.verification import kit
from research.verification.checks import OWN_CHECKS, read_checks
from research.verification.fetching import Fetcher
from research.verification.images import few_shots
from research.verification.measuring import gda_clip

pytestmark = pytest.mark.slow
NAMES = ["red_fox", "owl", "see"]  # the last name is misspelt
CHECK_NAMES = ["Red Fox", "Owl", "Sea"]
TEMPLATES = ["a photo of a {}.", "the {}."]
SHOTS, SEEDS, VIEWS = 3, (1, 2), 2


def picture(label, number, noise=40):
    """Return a noisy image whose colour shows the class."""
    draw = np.random.default_rng([label, number])
    colour = np.array([(200, 60, 60), (60, 200, 60), (60, 60, 200)][label])
    pixels = np.clip(colour + draw.normal(0, noise, (24, 30, 3)), 0, 255)
    return Image.fromarray(pixels.astype(np.uint8))


def png(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


ROWS = [(picture(label, number), label) for label in range(3) for number in range(4)]
# The paths as in an author's split file. One class has fewer training images than are drawn.
PATHS = {part: [] for part in ("train", "val", "test")}
for _label in (2, 0, 1):
    for _number in range(8):
        _part = (
            "test" if _number >= (4 if _label == 1 else 5) else "val" if _number >= 2 + (_label != 1) * 2 else "train"
        )
        PATHS[_part].append([f"{NAMES[_label]}/{_number}.png", _label, NAMES[_label]])
PATHS["train"] += [["red_fox/8.png", 0, "red_fox"]]


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    """Return the folders of the encoders that the stub of the Hub has."""
    folder = tmp_path_factory.mktemp("encoders")
    return {kind: save_encoder(kind, folder / kind) for kind in ("clip", "siglip", "dinov2")}


@pytest.fixture(scope="module")
def animals(tmp_path_factory):
    """Return the Parquet file and the archive of the images below."""
    return parquet(tmp_path_factory.mktemp("animals")), archive()


@pytest.fixture
def hub(monkeypatch, tmp_path, encoders, animals):
    """Serve a stub of the Hub and the web with all files that the checks below need."""
    monkeypatch.setenv("DULBE_PEFT_STORE", str(tmp_path / "cache" / "features.sqlite"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    with on_this_process(monkeypatch, tmp_path) as hub:
        for kind, folder in encoders.items():
            hub.commit(f"someone/{kind}", {path.name: path.read_bytes() for path in folder.iterdir()})
        hub.commit("someone/animals", {"data/test-00000-of-00001.parquet": animals[0], "README.md": b"x" * 999})
        hub.web["/photo.png"] = png(picture(0, 99))
        hub.web["/animals.tgz"] = animals[1]
        hub.web["/split.json"] = json.dumps(PATHS).encode()
        yield hub


def parquet(folder, column="img"):
    import datasets

    features = datasets.Features({column: datasets.Image(), "fine_label": datasets.ClassLabel(names=NAMES)})
    rows = {column: [image for image, _ in ROWS], "fine_label": [label for _, label in ROWS]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(folder / "rows.parquet")
    return (folder / "rows.parquet").read_bytes()


def archive():
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        for label, name in enumerate(NAMES):
            for number in range(9):
                content = png(picture(label, number))
                entry = tarfile.TarInfo(f"animals/images/{name}/{number}.png")
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
    return file.getvalue()


def checks_of(hub, **changes):
    """Return one check of each kind and its data, with `changes` by name."""
    sha256 = {path: hashlib.sha256(content).hexdigest() for path, content in hub.web.items()}
    data = {
        "photo": {"source": f"{hub.url}/photo.png", "sha256": sha256["/photo.png"][:16]},
        "animals": {
            "source": "hf:someone/animals",
            "files": {"test": "data/test-*.parquet"},
            "image_column": "img",
            "label_column": "fine_label",
            "misspelt": {"see": "sea"},
            "names": CHECK_NAMES,
            "classes": 3,
            "images": {"test": len(ROWS)},
        },
        "coop-animals": {
            "of": "animals",
            "source": f"{hub.url}/animals.tgz",
            "folder": "animals/images",
            "splits": {
                "name": "split_zhou_Animals.json",
                "url": f"{hub.url}/split.json",
                "sha256": sha256["/split.json"],
                "images": [len(PATHS[part]) for part in PATHS],
            },
        },
    }
    texts = ["a photo of the cat", "the digit"]
    model = {"model": "someone/clip", "source": "a table", "tolerance": 0.05}
    taught = {"level": 2, "measure": "taught", "data": "coop-animals", "shots": SHOTS, "seeds": list(SEEDS)}
    checks = [
        model
        | {"name": "logits", "level": 0, "measure": "logits", "data": "photo", "texts": texts, "expected": [0, 0]},
        model | {"name": "zero", "level": 1, "measure": "zero_shot", "data": "animals", "templates": TEMPLATES},
        model
        | taught
        | {"name": "gda", "views": VIEWS, "classifier": "gda", "alphas": [10, 100], "beside": ["lda", "bayes"]},
    ]
    checks[0] |= {"model": "someone/siglip"}
    checks[2] |= {"templates": TEMPLATES[:1]}
    checks.insert(1, model | {"name": "token", "level": 0, "measure": "class_token", "data": "photo"})
    checks[1] |= {"model": "someone/dinov2", "expected": [0, 0]}
    for check in checks:
        check |= {"expected": check.get("expected", [50])} | changes.get(check["name"], {})
    for name, entry in data.items():
        entry |= changes.get(name, {})
    return {"data": data, "checks": checks}


def verify(tmp_path, content, *flags):
    """Run the command on these checks; return its exit status, and the outcomes in its file by name."""
    file = tmp_path / "my.yaml"
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    output = tmp_path / "outcomes.json"
    status = main(["verify", "--checks", str(file), "--output", str(output), "--device", "cpu", *flags])
    outcomes = json.loads(output.read_text())["outcomes"] if output.exists() else []
    return status, {outcome["check"]["name"]: outcome for outcome in outcomes}


def literal_features(clip, images, resize=None):
    """Compute unit features with transformers' own model, image by image."""
    model, processor = clip
    if resize:
        processor = with_image_resize(processor, model, resize)
    with torch.no_grad():
        return torch.cat([unit_image_embeds(model, pixel_values(processor, image)[None]) for image in images]).numpy()


def literal_texts(clip, templates):
    """Compute, for each class, the normalized mean of the unit embeddings of its prompts."""
    model, processor = clip
    rows = []
    # The data of the split file uses the names in its rows.
    for name in CHECK_NAMES if len(templates) > 1 else [name.replace("_", " ") for name in NAMES]:
        texts = processor.tokenizer(
            [text.replace("{}", name) for text in templates], padding=True, return_tensors="pt"
        )
        with torch.no_grad():
            embeds = model.get_text_features(**texts)
        embeds = getattr(embeds, "pooler_output", embeds).double().numpy()
        mean = (embeds / np.linalg.norm(embeds, axis=1, keepdims=True)).mean(axis=0)
        rows.append(mean / np.linalg.norm(mean))
    return np.stack(rows)


def literal_gda(clip):
    """Compute the accuracy of GDA-CLIP for both seeds, in percent, from its formula."""
    labels = {part: np.array([label for _, label, _ in rows]) for part, rows in PATHS.items()}
    images = {
        part: [picture(label, int(path.split("/")[1][:-4])) for path, label, _ in rows] for part, rows in PATHS.items()
    }
    tests, texts, accuracies = literal_features(clip, images["test"]), literal_texts(clip, TEMPLATES[:1]), []
    tau = float(clip[0].logit_scale.detach().exp())
    for seed, alpha in zip(SEEDS, (10, 100), strict=True):
        random.seed(seed)
        drawn = []
        for label in dict.fromkeys(labels["train"].tolist()):
            members = [index for index, other in enumerate(labels["train"]) if other == label]
            drawn += random.sample(members, SHOTS) if len(members) >= SHOTS else random.choices(members, k=SHOTS)
        views = []
        for number in range(VIEWS):
            for index in drawn:
                content = hashlib.sha256(png(images["train"][index])).digest()
                seeds = (seed, number, int.from_bytes(content, "little"))
                views.append(augmented(images["train"][index], "crop+flip", seeds))
        rows = literal_features(clip, views, resize="squash").astype(np.float64)
        row_labels = np.tile(labels["train"][drawn], VIEWS)
        logits = reference.gda_clip_logits(rows, row_labels, texts, tests.astype(np.float64), alpha, tau)
        accuracies.append(100 * (logits.argmax(axis=1) == labels["test"]).mean())
    return accuracies


def test_numbers_of_every_level_equal_a_literal_computation(hub, tmp_path, capsys):
    from transformers import AutoModel

    model, processor = load_dual_encoder("someone/siglip")
    texts = processor.tokenizer(
        ["a photo of the cat", "the digit"], padding="max_length", max_length=24, return_tensors="pt"
    )
    pixels = processor.image_processor(images=picture(0, 99), return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        logits = model(input_ids=texts["input_ids"], pixel_values=pixels).logits_per_image[0].tolist()
        dino = AutoModel.from_pretrained("someone/dinov2")
        pixels = load_dual_encoder("someone/dinov2")[1].image_processor(picture(0, 99), return_tensors="pt")
        token = dino(**pixels).last_hidden_state[0, 0, :2].tolist()
    labels = np.array([label for _, label in ROWS])
    clip = load_dual_encoder("someone/clip")
    predicted = (literal_features(clip, [image for image, _ in ROWS]) @ literal_texts(clip, TEMPLATES).T).argmax(
        axis=1
    )
    seeds = literal_gda(clip)
    accuracy = 100 * (predicted == labels).mean()
    expected = {"logits": logits, "token": token, "zero": [accuracy], "gda": [np.mean(seeds)]}
    changes = {
        name: {"expected": np.asarray(values, float).tolist(), "tolerance": 1e-4} for name, values in expected.items()
    }
    status, outcomes = verify(tmp_path, checks_of(hub, **changes))
    assert status == 0, capsys.readouterr().out
    assert outcomes["gda"]["seeds"]["gda-clip"] == pytest.approx(seeds)
    assert set(outcomes["gda"]["beside"]) == {"lda", "bayes"}
    printed = capsys.readouterr().out
    assert "0 of 4 outside, 0 not run" in printed
    assert sum(line.endswith("  yes") for line in printed.splitlines()) == 4
    download = "to download: hf:someone/animals (data/test-*.parquet), 0.0 MB"
    assert printed.index(download) < printed.index("logits ...")
    content = json.loads((tmp_path / "outcomes.json").read_text())
    assert content["versions"]["torch"] == version("torch") and content["machine"]["device"] == "cpu"
    repo = hub.repos["someone/animals"]
    assert content["known"]["hf:someone/animals"] == repo["branches"]["main"]
    assert content["known"][f"{hub.url}/animals.tgz"] == hashlib.sha256(hub.web["/animals.tgz"]).hexdigest()
    assert f"seen for the first time, and recorded: hf:someone/animals {repo['branches']['main']}" in printed


def test_size_counts_only_what_is_not_downloaded_yet(hub, tmp_path, monkeypatch):
    fetcher = Fetcher(tmp_path / "kept")
    files = hub.files("someone/clip")
    wanted = sum(len(content) for name, content in files.items() if name.endswith((".json", ".txt", ".safetensors")))
    hub.commit("someone/clip", files | {"pytorch_model.bin": b"x" * 5000, "tf_model.h5": b"x" * 5000})
    assert fetcher.hub_size("someone/clip", "model", (), None) == wanted
    load_dual_encoder("someone/clip")
    assert fetcher.hub_size("someone/clip", "model", (), None) < wanted / 10  # files that nothing reads are left
    data = ("someone/animals", "dataset", ["data/test-*.parquet"], None)
    assert fetcher.hub_size(*data) == len(hub.files("someone/animals")["data/test-00000-of-00001.parquet"])
    fetcher.hub_files("someone/animals", "data/test-*.parquet", "main")
    assert fetcher.hub_size(*data) == 0
    url = f"{hub.url}/animals.tgz"
    assert fetcher.size(url) == len(hub.web["/animals.tgz"])
    fetcher.file(url, None)
    assert fetcher.size(url) == 0
    assert fetcher.size(f"{hub.url}/nothing") is None and fetcher.hub_size("someone/nobody", "model", (), None) is None


def test_stopped_checks_continue_with_the_first_commits(hub, tmp_path, capsys, monkeypatch):
    measure, measured = kit.measure, []

    def interrupt_third(check, *others):
        measured.append(check.name)
        if len(measured) == 3:
            raise KeyboardInterrupt
        return measure(check, *others)

    content = checks_of(hub, logits={"tolerance": 1e4}, token={"tolerance": 1e4}, zero={"tolerance": 100})
    content["checks"] = content["checks"][:3]
    monkeypatch.setattr(kit, "measure", interrupt_third)
    status, outcomes = verify(tmp_path, content)
    assert status == 130 and list(outcomes) == ["logits", "token"] and "--checks" in capsys.readouterr().err
    assert verify(tmp_path, content)[0] == 0 and measured == ["logits", "token", "zero", "zero"]
    first = hub.repos["someone/animals"]["branches"]["main"]
    hub.commit("someone/animals", {"data/test-00000-of-00001.parquet": b"another"})
    content["checks"][2]["tolerance"] = 99  # a changed row is measured again, on the same commit of the data
    assert verify(tmp_path, content)[0] == 0 and measured[4:] == ["zero"]
    assert f"/datasets/someone/animals/resolve/{first}/" in " ".join(path for _, path in hub.asked)


SPLIT = {"name": "split_zhou_Animals.json", "link": "https://example.org/split"}


@pytest.mark.parametrize(
    ("which", "changes", "words"),
    [
        ("logits", {"photo": {"sha256": "0" * 16}}, "/photo.png has the SHA-256 {photo}..., "),
        ("zero", {"animals": {"label_column": "label"}}, "animals has no column 'label'; its columns are ['img', "),
        ("gda", {}, "/animals.tgz was cut off: "),
        ("gda", {}, "/split.json cannot be downloaded: 404"),
        ("zero", {"animals": {"images": {"test": 9}}}, "animals has 12 images in the split 'test', expected 9"),
        ("zero", {"animals": {"names": ["Owl", "Sea", "Cat"]}}, "no name for the class 'red_fox' (1 such classes)"),
        ("zero", {"animals": {"misspelt": {"seee": "seaside"}}}, "no class 'seaside', and no misspelling"),
        ("zero", {"animals": {"files": {"test": "x/*.parquet"}}}, "has no file that matches 'x/*.parquet' at commit"),
        ("zero", {"zero": {"tolerance": 100, "model": "someone/nobody"}}, "someone/nobody"),
        ("gda", {"coop-animals": {"splits": SPLIT}}, "and give its path: --data coop-animals --splits"),
    ],
)
def test_failed_check_prints_one_line_and_can_be_repeated(hub, tmp_path, capsys, which, changes, words):
    small = {"zero": {"tolerance": 100}, "logits": {"tolerance": 1e4}, "gda": {"tolerance": 100, "views": 0}}
    content = checks_of(hub, **small | changes)
    content["checks"] = [check for check in content["checks"] if check["name"] == which]
    words = words.format(photo=hashlib.sha256(hub.web["/photo.png"]).hexdigest()[:16])
    cut_off = "cut off" in words
    if cut_off:
        hub.cut.add("/animals.tgz")
    elif "404" in words:
        del hub.web["/split.json"]
    status, outcomes = verify(tmp_path, content)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"{which}: not run: ")]
    assert status == 2 and len(lines) == 1 and words in lines[0]
    assert outcomes[which]["problem"] and not outcomes[which]["here"]
    if cut_off:
        hub.cut.clear()
        assert verify(tmp_path, content)[0] == 0


def test_each_check_reports_a_missing_network_in_one_line(hub, tmp_path, monkeypatch, capsys):
    nowhere = "http://127.0.0.1:1"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", nowhere)
    content = json.loads(json.dumps(checks_of(hub)).replace(hub.url, nowhere))
    status, outcomes = verify(tmp_path, content)
    assert status == 2 and len(outcomes) == 4
    lines = [line for line in capsys.readouterr().out.splitlines() if ": not run: " in line]
    problems = [line.partition(": not run: ")[2] for line in lines]
    hub_problems = [line for line in problems if line.startswith("the Hub cannot be reached: ")]
    assert hub_problems == [outcomes["zero"]["problem"]]
    downloads = [line for line in problems if line.startswith(f"{nowhere}/") and "cannot be downloaded: " in line]
    assert len(downloads) == 3, problems


def test_number_outside_its_tolerance_fails_unless_unconfirmed(hub, tmp_path, capsys):
    content = checks_of(hub, zero={"expected": [-1]})
    content["checks"] = [content["checks"][2]]
    assert verify(tmp_path, content, "--level", "1", "--data", "animals")[0] == 1
    assert "zero" in capsys.readouterr().out.split("check ")[1]
    content["checks"][0]["confirmed"] = False
    assert verify(tmp_path, content)[0] == 0
    printed = capsys.readouterr().out
    assert "unconfirmed" in printed and "0 of 1 outside" in printed and "-1.00" in printed


def test_local_files_need_no_network(hub, tmp_path, monkeypatch, capsys):
    (tmp_path / "split.json").write_bytes(hub.web["/split.json"])
    with tarfile.open(fileobj=io.BytesIO(hub.web["/animals.tgz"])) as tar:
        tar.extractall(tmp_path / "here", filter="data")
    save_encoder("clip", tmp_path / "tiny")
    split = {"name": "split.json", "link": "nowhere", "sha256": hashlib.sha256(hub.web["/split.json"]).hexdigest()[:9]}
    data = {"coop-animals": {"source": "", "splits": split}}
    content = checks_of(hub, gda={"model": "tiny", "views": 0, "tolerance": 100}, **data)
    content["checks"] = content["checks"][3:]
    asked = len(hub.asked)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    places = ["--splits", str(tmp_path / "split.json"), "--images", str(tmp_path / "here")]
    assert verify(tmp_path, content, "--data", "animals", *places)[0] == 0, capsys.readouterr()
    assert len(hub.asked) == asked
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    for given, words in ((places, "measured before"), ([*places[:3], str(tmp_path / "there")], "gda ...")):
        capsys.readouterr()
        assert verify(tmp_path, content, "--data", "animals", *given)[0] == 0
        assert words in capsys.readouterr().out, "images in another folder are measured again"
    (tmp_path / "split.json").write_text(json.dumps({**PATHS, "test": [["a.png", "0", "red_fox"]]}))
    split |= {"sha256": None, "name": "another.json"}
    status, outcomes = verify(tmp_path, content, "--data", "animals", *places)
    assert status == 2 and "split.json is damaged or foreign: test.0.1: " in outcomes["gda"]["problem"]


def test_error_names_the_invalid_field_of_a_check(tmp_path, capsys):
    content = yaml.safe_load(OWN_CHECKS.read_text(encoding="utf-8"))
    del content["shared"]
    content["checks"] = content["checks"][:2]
    for change, words in [
        ({"level": 3}, "checks.0.level"),
        ({"texts": []}, "needs one text per expected logit"),
        ({"texts": ["one"]}, "needs one text per expected logit"),
        ({"data": "photo"}, "unknown data 'photo'; did you mean 'photograph'?"),
        ({"name": "siglip-b16"}, "two checks are called 'siglip-b16'"),
        ({"expected": []}, "must expect at least one number"),
        ({"alphas": [1]}, "alphas belong to the classifier 'gda'"),
    ]:
        changed = {**content, "checks": [content["checks"][0] | change, *content["checks"][1:]]}
        (tmp_path / "my.yaml").write_text(yaml.safe_dump(changed), encoding="utf-8")
        assert main(["verify", "--checks", str(tmp_path / "my.yaml"), "--list"]) == 2
        error = capsys.readouterr().err
        assert words in error and len(error.splitlines()) == 1, error
    assert main(["verify", "--data", "petz", "--list"]) == 2
    assert "did you mean 'pets'?" in capsys.readouterr().err
    assert main(["verify", "--level", "1", "--images", str(tmp_path)]) == 2
    assert "--splits and --images belong to one data set of" in capsys.readouterr().err


def test_list_shows_every_check_and_the_source_of_its_number(capsys, monkeypatch):
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("the network was asked"))
    assert main(["verify", "--list"]) == 0
    printed = capsys.readouterr().out
    checks = read_checks(OWN_CHECKS).checks
    assert {check.level for check in checks} == {0, 1, 2}
    for check in checks:
        assert f"  {check.name}  " in printed and check.source in printed
    assert main(["verify", "--list", "--level", "2", "--data", "pets"]) == 0
    printed = capsys.readouterr().out
    assert "gda-pets" in printed and "pets-b16" not in printed
    assert all(not check.confirmed for check in checks if check.classifier == "prototype")


@pytest.mark.parametrize("alpha", [0.01, 0.1, 1.0, 10.0, 100.0])
def test_gda_clip_settings_give_the_published_scores(alpha):
    draw = np.random.default_rng(0)
    unit = lambda *shape: (rows := draw.normal(size=shape)) / np.linalg.norm(rows, axis=1, keepdims=True)  # noqa: E731
    centres, labels = unit(10, 24), np.repeat(np.arange(10), 16)
    images = centres[labels] + 0.2 * draw.normal(size=(160, 24))
    images /= np.linalg.norm(images, axis=1, keepdims=True)
    texts, tests = unit(10, 24), unit(50, 24)
    classifier = make_classifier(gda_clip(alpha, 160, 10, 24), 24)
    classifier.add_classes([f"class {number}" for number in range(10)], images, labels, texts)
    actual = classifier(tests).double().numpy() * max(1, float(classifier.alpha))  # undoes our scaling of the scores
    expected = reference.gda_clip_logits(images, labels, texts, tests, alpha)
    actual, expected = (scores - scores.mean(axis=1, keepdims=True) for scores in (actual, expected))
    assert np.abs(actual - expected).max() <= 1e-5 * np.abs(expected).max()


def test_few_shots_equals_the_draws_of_the_authors():
    labels = np.array([3, 1, 3, 3, 1, 0, 3, 1, 1, 0])
    for seed in (1, 2, 3):
        random.seed(seed)
        rows = {label: np.flatnonzero(labels == label).tolist() for label in (3, 1, 0)}
        expected = random.sample(rows[3], 3) + random.sample(rows[1], 3) + random.choices(rows[0], k=3)
        assert few_shots(labels, 3, seed) == expected
