"""Links between MLflow pages: each is a tag of the object, and the object's description lists them.

MLflow shows descriptions as Markdown, so that the links can be clicked. Text above the links is kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from mlflow.utils.mlflow_tags import MLFLOW_RUN_NOTE

from penstock.storage.tracking.mlflow.values import replace_forbidden_characters

_TAG = "mlflow.penstock.link."  # MLflow does not list tags that begin with "mlflow."
_HEADING = "#### Links"
_MAX_LINKS = 25  # of one role in the description, the newest by title; fewer if the description would be too long
_MAX_TEXT = 8000  # characters of a description; MLflow cuts longer ones of runs


class Link(NamedTuple):
    """A link to another MLflow page."""

    role: str  # what the other object is to this one, e.g. "evaluated in"
    title: str
    url: str


def link_tags(tags: Mapping[str, str], links: list[Link], text: str | None = None) -> dict[str, str]:
    """Return the tags to set so that an object has more links; {} if it has all of them.

    Args:
        tags: the object's tags.
        links: to add.
        text: description above the links, if the object does not have one.
    """
    new = {replace_forbidden_characters(f"{_TAG}{link.role}/{link.title}")[:250]: link.url for link in links}
    kept = tags.get(MLFLOW_RUN_NOTE, "").partition(_HEADING)[0].strip()
    all_links = {name: url for name, url in {**tags, **new}.items() if name.startswith(_TAG)}
    description = describe_links(kept or text or "", all_links)
    changed = {name: url for name, url in new.items() if tags.get(name) != url}
    if description != tags.get(MLFLOW_RUN_NOTE, ""):
        changed[MLFLOW_RUN_NOTE] = description
    return changed


def describe_links(text: str, links: Mapping[str, str]) -> str:
    """Return a description: `text`, then a list of links, given by the names of their tags."""
    roles: dict[str, list[str]] = defaultdict(list)
    for name in sorted(links):
        role, _, title = name.removeprefix(_TAG).partition("/")
        roles[role].append(f"[{title}]({links[name]})")
    num_links = _MAX_LINKS
    while len(description := _list_links(text, roles, num_links)) > _MAX_TEXT and num_links > 1:
        num_links -= 1
    return description


def _list_links(text: str, roles: Mapping[str, list[str]], num_links: int) -> str:
    lines = []
    for role, pages in sorted(roles.items()):
        more = f"{len(pages) - num_links} more, " if len(pages) > num_links else ""
        lines.append(f"- {role}: {more}{', '.join(pages[-num_links:])}")
    return "\n\n".join(part for part in (text, "\n".join([_HEADING, "", *lines]) if lines else "") if part)
