"""Blend files: what they say, and every mistake in them named."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from data_prep.blend import Blend, BlendEntry, load_blend
from data_prep.errors import UserError

CC = {"name": "Pile-CC", "train": "pile.pile-cc.train", "validation": "pile.pile-cc.validation", "weight": 0.75}
WIKI = {"name": "Wikipedia (en)", "train": "/data/wiki.train", "weight": 1}


def write(folder: Path, *entries: Any, **others: Any) -> Path:
    path = folder / "pile.blend.yaml"
    path.write_text(yaml.safe_dump({"datasets": list(entries), **others}))
    return path


def test_prefixes_are_relative_to_the_file(tmp_path: Path) -> None:
    assert load_blend(write(tmp_path, CC, WIKI, weights_by="size")) == Blend(
        (
            BlendEntry(
                "Pile-CC", tmp_path / "pile.pile-cc.train", tmp_path / "pile.pile-cc.validation", None, 0.75
            ),
            BlendEntry("Wikipedia (en)", Path("/data/wiki.train"), None, None, 1.0),
        ),
        "size",
    )


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([], "datasets must be a list"),
        (["pile.train"], "entry 1: expected keys"),
        ([CC | {"wieght": 1}], "entry 1: unknown key wieght; known: name, test, train"),
        ([CC, {"name": "x", "weight": 1}], "entry 2 has no train"),
        ([{"name": "x", "train": "x"}], "entry 1 has no weight"),
        ([CC | {"name": None}], "entry 1 has no name"),
        ([CC | {"train": 3}], "entry 1 (Pile-CC): train must be text, got 3"),
        *[
            ([CC | {"weight": weight}], "entry 1 (Pile-CC): weight must be a number above 0")
            for weight in (0, -1, float("nan"), float("inf"), "0.5", True)
        ],
        ([CC, CC | {"train": "other"}], "the name Pile-CC stands twice"),
        ([CC, CC | {"name": "again"}], "the train"),
        ([CC, WIKI | {"test": "pile.pile-cc.train"}], "is trained on, too"),
    ],
)
def test_mistake_is_named(tmp_path: Path, entries: list[Any], words: str) -> None:
    path = write(tmp_path, *entries)
    with pytest.raises(UserError) as raised:
        load_blend(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_unreadable_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "pile.blend.yaml"
    with pytest.raises(UserError, match=rf"{path}: No such file"):
        load_blend(path)
    for content, words in (
        ("datasets: [", "not YAML"),
        ("[1, 2]", "expected keys"),
        ("datasets: []\ndatasets: []", "the key 'datasets' stands twice"),
        ("sets: []", "unknown key sets"),
    ):
        path.write_text(content)
        with pytest.raises(UserError, match=words):
            load_blend(path)
