"""The text and the code of the README and of the pages, and what setup.cfg says."""

import configparser
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def text_of(page):
    return (ROOT / page).read_text(encoding="utf-8")


def setup_cfg():
    found = configparser.ConfigParser()
    found.read_string(text_of("setup.cfg"))
    return found


def blocks(page, *languages):
    """(language, title, code) of each block of code, in order; a block of two names is one of the first."""
    found = re.findall(r'^```(\w+)(?: title="([^"]*)")?\n(.*?)^```', text_of(page), flags=re.DOTALL | re.MULTILINE)
    return [block for block in found if block[0] in languages]
