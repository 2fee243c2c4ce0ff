"""Make the README's links absolute, for a package index, which has no files of the repository.

    python docs/readme_links.py OWNER/NAME TAG

The release workflow runs it, because only GitHub knows the address of the repository that is released. It rewrites
README.md in place.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

_LINK = re.compile(r"(?P<is_image>!?)(?P<text>\[[^\]]*\])\((?P<target>[^)\s]+)\)")
_ABSOLUTE = re.compile(r"[a-z]+:|#|/")


def with_absolute_links(text: str, repository: str, tag: str) -> str:
    """The Markdown `text`, with links to the files of `repository` (OWNER/NAME) at `tag`, and to raw pictures."""

    def absolute(link: re.Match[str]) -> str:
        if _ABSOLUTE.match(link["target"]):
            return link[0]
        host, kind = ("raw.githubusercontent.com", "") if link["is_image"] else ("github.com", "blob/")
        return f"{link['is_image']}{link['text']}(https://{host}/{repository}/{kind}{tag}/{link['target']})"

    return _LINK.sub(absolute, text)


if __name__ == "__main__":
    readme = Path(__file__).parents[1] / "README.md"
    readme.write_text(with_absolute_links(readme.read_text("utf-8"), *sys.argv[1:3]), "utf-8")
