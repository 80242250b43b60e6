"""Read the text and the code blocks of the README and the docs, and the settings in setup.cfg."""

import configparser
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def text_of(page):
    return (ROOT / page).read_text(encoding="utf-8")


def setup_cfg():
    parser = configparser.ConfigParser()
    parser.read_string(text_of("setup.cfg"))
    return parser


def blocks(page, *languages):
    """Return (language, title, code) for each code block of a page in one of the languages, in order."""
    return blocks_of(text_of(page), *languages)


def blocks_of(text, *languages):
    """Return what `blocks` returns for the text of a page or of a part of it."""
    every = re.findall(r'^```(\w+)(?: title="([^"]*)")?\n(.*?)^```', text, flags=re.DOTALL | re.MULTILINE)
    return [block for block in every if block[0] in languages]


def split_numbers(text):
    """Replace every decimal number by `#`, and return the text and the numbers, without those of seconds."""
    text = re.sub(r"\d+\.\d+ s\b", "some s", text)
    return re.sub(r"\d+\.\d+", "#", text), [float(number) for number in re.findall(r"\d+\.\d+", text)]
