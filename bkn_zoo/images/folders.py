"""Finds the images of a folder by their file names."""

import os
from collections import Counter
from pathlib import Path

SUFFIXES = frozenset({".jpg", ".jpeg", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"})


def image_files(folder: str | os.PathLike[str], others: Counter[str] | None = None) -> list[str]:
    """The names of all images in a folder and its subfolders, in order, without hidden files.

    Links to folders are followed, except to folders that were visited already or that contain the link.

    Args:
        others: counts the other files, by their suffixes.
    """
    whole = os.path.realpath(folder)
    seen = {whole, *(str(above) for above in Path(whole).parents)}
    found = []
    for place, inner, names in os.walk(folder, followlinks=True):
        # Entries that are not links come first, so that they keep their own names.
        links = {name for name in inner if os.path.islink(os.path.join(place, name))}
        shown = [*sorted({*inner} - links), *sorted(links)]
        inner.clear()
        for name in shown:
            real = os.path.realpath(os.path.join(place, name))
            if not name.startswith(".") and real not in seen:
                seen.add(real)
                inner.append(name)
        for name in names:
            suffix = os.path.splitext(name)[1].lower()
            if name.startswith("."):
                continue
            if suffix in SUFFIXES:
                found.append(os.path.join(place, name))
            elif others is not None:
                others[suffix] += 1
    return sorted(found, key=lambda name: name.split(os.sep))


def passed_over(folder: str | os.PathLike[str], others: Counter[str]) -> str:
    """A message about the other files that `image_files` counted: how many of which kind."""
    kinds = ", ".join(f"{count} {suffix or 'without a suffix'}" for suffix, count in sorted(others.items()))
    remedy = "convert images among them to JPEG or PNG"
    return f"skipped files in {folder} without the suffix of a supported image format: {kinds}; {remedy}"
