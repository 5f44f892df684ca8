"""Types of fields for names that Google gives or takes: zones, network tags, accounts, labels.

One place for the rules that both of Google's backends hold options to. Not here: what an option means.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from raytpu_ops.tpu.fields import Line, Word, matching
from raytpu_ops.tpu.naming import LABEL_PREFIX

#: ``us-east5-b``, and those for AI: ``us-central1-ai1a``.
_ZONE = re.compile(r"[a-z]+-[a-z]+[0-9]+-[a-z][a-z0-9]*\Z")
#: https://cloud.google.com/vpc/docs/add-remove-network-tags
_TAG = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?\Z")
_ACCOUNT = re.compile(r"[A-Za-z0-9._-]+@[A-Za-z0-9.-]+\.[A-Za-z]+\Z")
#: A network, a subnetwork, a policy: by its name or its path in a project.
_RESOURCE = re.compile(r"[A-Za-z0-9.:/_-]+\Z")
#: https://cloud.google.com/compute/docs/labeling-resources#requirements; it ends with no dash or underscore, as
#: Kubernetes wants it, whose nodes get the same ones.
_LABEL_KEY = re.compile(r"[a-z]([a-z0-9_-]{0,61}[a-z0-9])?\Z")
_LABEL_VALUE = re.compile(r"([a-z0-9]([a-z0-9_-]{0,61}[a-z0-9])?)?\Z")
#: Commas between words; those in brackets belong to a word, as in ``ray[default,serve]``.
_COMMAS = re.compile(r",(?![^\[\]]*\])")


def _words(value: object) -> object:
    """A list; text is read as one with commas, as a form and a lease's ``place`` have it."""
    if isinstance(value, str):
        return [word.strip() for word in _COMMAS.split(value) if word.strip()]
    return list(value) if isinstance(value, tuple) else value


def _labels(value: dict[str, str]) -> dict[str, str]:
    for key, text in value.items():
        if not _LABEL_KEY.match(key) or not _LABEL_VALUE.match(text):
            raise ValueError(
                "must be labels as Google and Kubernetes have them: lower-case letters, digits, dashes and "
                "underscores, at most 63 characters, and no dash or underscore at the end"
            )
        if key.startswith(LABEL_PREFIX):
            raise ValueError(f"must not begin with {LABEL_PREFIX!r}: leases are found by those labels")
    return value


def is_zone(location: str) -> bool:
    """Whether a location is a zone; regions are the others."""
    return _ZONE.match(location) is not None


def region_of(location: str) -> str:
    """The region that a zone is in; a region is its own."""
    return location.rpartition("-")[0] if is_zone(location) else location


Zone = Annotated[Word, matching(_ZONE, "must be a zone of Google Cloud such as 'us-east5-b'")]
#: A list of zones, or text with commas.
Zones = Annotated[list[Zone], BeforeValidator(_words)]
#: A list of words, or text with commas.
Words = Annotated[list[Word], BeforeValidator(_words)]
Tags = Annotated[
    list[Annotated[Word, matching(_TAG, "must be a network tag: lower-case letters, digits and dashes, at most 63")]],
    BeforeValidator(_words),
]
Account = Annotated[
    Word,
    matching(_ACCOUNT, "must be the e-mail address of a service account, 'NAME@PROJECT.iam.gserviceaccount.com'"),
]
Resource = Annotated[
    Line, matching(_RESOURCE, "must be a name such as 'ml', or a path such as 'projects/PROJECT/global/networks/ml'")
]
Labels = Annotated[dict[Word, Annotated[str, Field(max_length=63)]], AfterValidator(_labels)]
