"""What the metadata of a release says of its addresses: a hook of the build (pyproject.toml).

The repository names no host of its own. A release is built with the address of its repository in
one place, the variable STILLFRESH_REPOSITORY. From it come the project's links, and the links and
the pictures of the README, which lead nowhere on the page of a package registry while they are
relative. Without the variable there are no links, and the README stays as it is. A wheel that is
built from a source distribution has the links of that.
"""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

VARIABLE = "STILLFRESH_REPOSITORY"
LINK = re.compile(r"(!?)\[([^]]*)\]\((?!\w+:|#)([^)\s]+)\)")
"""A link or a picture of the README whose target is a file of the repository."""


def urls(repository: str, version: str) -> dict[str, str]:
    """The links of the project, as registries list them."""
    files = f"{repository}/blob/v{version}"
    return {
        "Homepage": repository,
        "Documentation": f"{files}/docs/index.md",
        "Changelog": f"{files}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
        "Source": repository,
    }


def with_whole_links(readme: str, repository: str, version: str) -> str:
    """The README with links that lead to this version's files, from wherever it is shown."""

    def whole(link: re.Match[str]) -> str:
        mark, text, target = link.groups()
        kind = "raw" if mark else "blob"
        return f"{mark}[{text}]({repository}/{kind}/v{version}/{target})"

    return LINK.sub(whole, readme)


class ReleaseMetadata(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        """Add README and links to the metadata, unless a source distribution has brought them."""
        if "readme" in metadata:
            return
        readme = Path(self.root, "README.md").read_text(encoding="utf-8")
        repository = os.environ.get(VARIABLE, "").rstrip("/")
        if repository:
            readme = with_whole_links(readme, repository, metadata["version"])
            metadata["urls"] = urls(repository, metadata["version"])
        metadata["readme"] = {"content-type": "text/markdown", "text": readme}
