"""Read what the metadata of the package and the changelog state."""

from __future__ import annotations

import re
from configparser import ConfigParser, SectionProxy

from tests.launch import REPOSITORY


def setup(section: str) -> SectionProxy:
    """Return a section of ``setup.cfg``."""
    config = ConfigParser()
    config.read(REPOSITORY / "setup.cfg", encoding="utf-8")
    return config[section]


def python_versions() -> list[str]:
    """Return the versions of Python that the classifiers name, such as "3.11"."""
    return re.findall(r"Python :: (3\.\d+)$", setup("metadata")["classifiers"], re.MULTILINE)


def changelog() -> dict[str, str]:
    """Return the text of each section of the changelog, by its version. The first one is not released yet."""
    _, *found = re.split(r"^## \[(.+?)\].*$", (REPOSITORY / "CHANGELOG.md").read_text("utf-8"), flags=re.MULTILINE)
    return {heading: text.strip() for heading, text in zip(found[::2], found[1::2], strict=True)}
