"""What setup.cfg cannot say: where the project lives. The owner fills in one line; all addresses follow from it."""

import os
import re
from pathlib import Path

from setuptools import setup

REPOSITORY = os.environ.get("DULBE_PEFT_REPOSITORY", "")  # fill in: "https://github.com/OWNER/dulbe_peft"
PLACES = {
    "Documentation": "blob/main/docs/index.md",
    "Changelog": "blob/main/CHANGELOG.md",
    "Issues": "issues",
    "Security": "blob/main/SECURITY.md",
    "Published numbers": "blob/main/docs/verify.md",
}


def absolute(text: str, repository: str) -> str:
    """A page whose links also work where the page stands alone, as on an index of packages."""

    def complete(found: re.Match[str]) -> str:
        kind = "raw" if found[1] == "!" else "blob"
        return f"{found[1]}[{found[2]}]({repository}/{kind}/main/{found[3]})"

    return re.sub(r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)]+)\)", complete, text)


page, places = Path(__file__).with_name("README.md").read_text(encoding="utf-8"), {}
if REPOSITORY:
    page, places = absolute(page, REPOSITORY), {name: f"{REPOSITORY}/{place}" for name, place in PLACES.items()}
setup(url=REPOSITORY, project_urls=places, long_description=page, long_description_content_type="text/markdown")
