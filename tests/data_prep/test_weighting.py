"""Weights of a blend: by size, as the Pile's paper says, by temperature; and the files that hold them."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from pile_texts import TINY

from data_prep import blend as blend_module
from data_prep.blend import (
    Blend,
    BlendEntry,
    Weighting,
    blend_datasets,
    load_blend,
    main,
    pile_weights,
    save_blend,
)
from data_prep.errors import UserError
from data_prep.manifest import load_manifest
from data_prep.preprocess import plan_job, prepare
from data_prep.sources import ReadOptions


def test_published_weights_follow_from_the_papers_sizes_and_epochs():
    path = Path(blend_module.__file__).parent / "pile_weights.yaml"
    components = yaml.safe_load(path.read_text())
    effective = {each["name"]: each["raw_gib"] * each["epochs"] for each in components}
    assert len(components) == 22
    assert sum(each["raw_gib"] for each in components) == pytest.approx(825.18, abs=0.005)  # the paper's total
    assert sum(effective.values()) == pytest.approx(1254.20, abs=0.01)
    for name, weight in pile_weights().items():
        assert weight == pytest.approx(100 * effective[name] / sum(effective.values()), abs=0.011)
    assert sum(pile_weights().values()) == pytest.approx(100)


def test_weights():
    tokens = {"Pile-CC": 900, "Stack Exchange": 100}
    assert Weighting().weights(tokens) == {"Pile-CC": 0.9, "Stack Exchange": 0.1}
    assert Weighting("temperature", 2.0).weights(tokens) == {"Pile-CC": 0.75, "Stack Exchange": 0.25}
    assert Weighting("temperature", 1.0).weights(tokens) == Weighting().weights(tokens)
    by_pile = Weighting("pile").weights(tokens)  # "Stack Exchange" in the paper, "StackExchange" in the files
    assert by_pile["Pile-CC"] / by_pile["Stack Exchange"] == pytest.approx(18.11 / 5.13, rel=1e-4)
    with pytest.raises(UserError, match="'my notes' is no component of the Pile"):
        Weighting("pile").weights({"my notes": 1})
    for temperature in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(UserError, match="--temperature"):
            Weighting("temperature", temperature)


def test_what_is_saved_is_read_back(tmp_path: Path):
    folder = tmp_path / "a"
    entries = (
        BlendEntry("Pile-CC", folder / "p.pile-cc.train", folder / "p.pile-cc.validation", None, 0.25),
        BlendEntry("漢字", tmp_path / "b" / "x", None, None, 0.75),
    )
    save_blend(Blend(entries, "size"), folder / "p.blend.yaml")
    read = load_blend(folder / "p.blend.yaml")
    assert [entry.name for entry in read.entries] == ["Pile-CC", "漢字"] and read.weights_by == "size"
    for entry, expected in zip(read.entries, entries, strict=True):
        assert entry.train.resolve() == expected.train.resolve() and entry.weight == expected.weight
    (tmp_path / "a").rename(tmp_path / "moved")  # prefixes are relative
    assert (
        load_blend(tmp_path / "moved" / "p.blend.yaml").entries[0].train == tmp_path / "moved" / "p.pile-cc.train"
    )


def test_a_blend_of_existing_datasets(tmp_path: Path, tokenizer_path: Path, capsys: Any):
    job = plan_job([TINY], tokenizer_path, tmp_path / "d", ReadOptions(), split=(0.7, 0.3, 0.0))
    prepare(job)
    arguments = ["--output", str(tmp_path / "out.yaml"), "--datasets"]
    assert main([*arguments, str(tmp_path / "d.train")]) == 0
    (entry,) = load_blend(tmp_path / "out.yaml").entries
    assert (entry.name, entry.train, entry.test) == ("d.train", tmp_path / "d.train", None)
    assert entry.validation == tmp_path / "d.validation"
    blend = blend_datasets([tmp_path / "d.train", tmp_path / "d.validation"], Weighting())
    tokens = [load_manifest(tmp_path / name).tokens for name in ("d.train", "d.validation")]
    assert [each.weight for each in blend.entries] == pytest.approx([n / sum(tokens) for n in tokens], rel=1e-5)
    assert main([*arguments, str(tmp_path / "d.train"), str(tmp_path / "d.train")]) == 2
    assert "a second dataset of d.train" in capsys.readouterr().err
    assert main([*arguments, str(tmp_path / "none")]) == 2
    assert "none.manifest.json: no such file" in capsys.readouterr().err
