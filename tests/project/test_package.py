"""Files around the package: addresses, workflows, issue templates, the list of pages, the lowest versions."""

import re
import runpy
import subprocess
from pathlib import Path

import pytest
import yaml
from documents import setup_cfg, text_of

ROOT = Path(__file__).parents[2]
SAMPLE = "https://example.org/OWNER/dulbe_peft"


def setup_arguments(monkeypatch, repository):
    """Return the arguments that setup.py passes to setuptools if the project has the address `repository`."""
    arguments = {}
    monkeypatch.setattr("setuptools.setup", arguments.update)
    monkeypatch.setenv("DULBE_PEFT_REPOSITORY", repository)
    runpy.run_path(str(ROOT / "setup.py"))
    return arguments


def test_links_on_package_index_page_are_absolute_and_valid(monkeypatch):
    arguments = setup_arguments(monkeypatch, SAMPLE)
    page = arguments["long_description"]
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)]+)\)", page)
    assert len(links) == len(re.findall(r"\]\(([^)]+)\)", text_of("README.md"))) and SAMPLE in page
    for image, link in [*links, *(("", address) for address in arguments["project_urls"].values())]:
        assert link.startswith("https://")
        file = re.fullmatch(rf"{SAMPLE}/(raw|blob)/main/([^#]+)(#.*)?", link)
        assert file is None or (ROOT / file[2]).is_file()
        assert file is None or file[1] == ("raw" if image else "blob")
    assert arguments["url"] == SAMPLE and f"{SAMPLE}/issues" in arguments["project_urls"].values()


def test_index_page_without_repository_address_is_the_readme(monkeypatch):
    arguments = setup_arguments(monkeypatch, "")
    assert arguments["long_description"] == text_of("README.md")
    assert not arguments["url"] and not arguments["project_urls"]


def test_workflows_and_issue_templates_are_complete():
    workflow = text_of(".github/workflows/tests.yml")
    given = re.findall(r"PIP_\w+_URL", workflow)  # uv does not read them
    assert given and all(f"${{{name}:-" in text_of(".ci/run") for name in given)
    tests = yaml.safe_load(workflow)
    steps = [step.get("run", "") for job in tests["jobs"].values() for step in job["steps"]]
    assert ".ci/run" in steps and any("constraints-lowest.txt" in step for step in steps)
    for word in " ".join(steps).split():
        if word.startswith("tests/"):
            assert (ROOT / word).exists(), word
    publish = yaml.safe_load(text_of(".github/workflows/publish.yml"))["jobs"]
    assert publish["build"]["if"] == "vars.PUBLISH == 'true'" and publish["publish"]["needs"] == "build"
    forms = {path.stem: str(yaml.safe_load(text_of(path))) for path in ROOT.glob(".github/ISSUE_TEMPLATE/*.yml")}
    assert "`dulbe-peft env`" in forms["bug"] and "`verify.json`" in forms["verify"]


def test_actions_of_others_are_pinned_to_commits_and_updated():
    for path in ROOT.glob(".github/workflows/*.yml"):
        actions = re.findall(r"uses: (.*)", text_of(path.relative_to(ROOT)))
        assert actions and all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v[\d.]+", action) for action in actions), path
    updates = yaml.safe_load(text_of(".github/dependabot.yml"))["updates"]
    assert {update["package-ecosystem"] for update in updates} == {"github-actions", "pip"}


def test_source_archive_takes_every_file_of_the_repository():
    if not (ROOT / ".git").exists():
        pytest.skip("the files of the repository are known in a clone")
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    lines = [line.split() for line in text_of("MANIFEST.in").splitlines()]
    folders = {"dulbe_peft", *(folder for word, *rest in lines if word == "graft" for folder in rest)}
    patterns = [pattern for word, *rest in lines if word == "include" for pattern in rest]
    patterns += ["LICENSE", "MANIFEST.in", "setup.cfg", "setup.py"]  # which setuptools takes by itself
    for path in map(Path, listed):
        assert path.parts[0] in folders or any(path.match(pattern) for pattern in patterns), path


def test_llms_txt_lists_every_page():
    listed = re.findall(r"\]\((docs/[^)]+)\)", text_of("llms.txt"))
    generated = runpy.run_path(str(ROOT / "docs" / "generate.py"))["llms"]()
    assert re.findall(r"\]\((docs/[^)]+)\)", generated) == listed  # if this fails, run: python docs/generate.py llms
    pages = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert set(listed) == pages
    titles = re.findall(r"^- \[([^\]]+)\]", text_of("llms.txt"), re.MULTILINE)
    assert len({*titles}) == len(titles) == len(pages)


def test_contributing_says_why_each_package_is_in_the_core():
    rows = re.findall(
        r"^\| ([\w, -]+) \| \w.*\|$", text_of("CONTRIBUTING.md").partition("## Dependencies")[2], re.MULTILINE
    )
    named = {name for row in rows for name in row.split(", ")} - {"package"}
    required = setup_cfg()["options"]["install_requires"].split()
    assert named == {re.split("[<>=!]", line)[0] for line in required}


def test_lowest_constraints_match_setup():
    setup = setup_cfg()
    required = setup["options"]["install_requires"].split()
    for extra in ("photos", "datasets", "excel", "heic", "onnx", "dask"):
        required += setup["options.extras_require"][extra].split()
    lowest = dict(
        line.split("==") for line in text_of("constraints-lowest.txt").splitlines() if not line.startswith("#")
    )
    for line in required:
        name, least = line.partition(",")[0].split(">=")
        pinned = [int(part) for part in lowest[name].split(".")]
        bound = [int(part) for part in least.split(".")]
        assert pinned[: len(bound)] == bound, line
