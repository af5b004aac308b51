"""Hugging Face datasets, by the hub's name or by a local path.

    hf:NAME[:CONFIG][@SPLIT]          loaded into datasets' cache, whose .arrow files are then read
    hf-stream:NAME[:CONFIG][@SPLIT]   read file by file as it comes, nothing kept

A local path may be what Dataset.save_to_disk wrote (hf only) or a folder that load_dataset knows. Without
@SPLIT the dataset must have a single one.
"""

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_prep.errors import UserError
from data_prep.sources.documents import BadLine, Place

if TYPE_CHECKING:
    pass

CACHED, STREAMED = "hf:", "hf-stream:"


def cached_files(name: str) -> list[Path]:
    """The .arrow files that hold the rows of the dataset `name`, in its order.

    Raises UserError if it cannot be loaded, or is no plain sequence of whole files."""
    dataset = _load(name, streaming=False)
    from pyarrow import memory_map
    from pyarrow.ipc import open_stream

    files = [Path(entry["filename"]) for entry in dataset.cache_files]
    num_rows = 0
    for file in files:
        with memory_map(str(file)) as mapped, open_stream(mapped) as reader:
            num_rows += sum(batch.num_rows for batch in reader)
    if dataset._indices is not None or num_rows != dataset.num_rows:
        raise UserError(f"{name}: is a selection of a dataset; save it whole (flatten_indices, save_to_disk)")
    return files


def num_parts(name: str) -> int:
    """Number of files of a streamed dataset. Raises UserError if it cannot be opened."""
    return _load(name, streaming=True).num_shards


def streamed_rows(name: str, start: int, end: int | None) -> Iterator[tuple[Place, dict[str, Any]]]:
    """The rows of a streamed dataset's parts [start, end). Raises BadLine where one cannot be read."""
    dataset = _load(name, streaming=True)
    for part in range(start, dataset.num_shards if end is None else end):
        place = Place(f"{name} part {part}", "row", 0)
        try:
            for number, record in enumerate(dataset.shard(dataset.num_shards, part)):
                place = Place(place.path, "row", number)
                yield place, record
        except UserError:
            raise
        except Exception as error:  # whatever the part's own reader meets
            raise BadLine(f"{place}: the next cannot be read ({_brief(error)})", "truncated_file") from error


@lru_cache(maxsize=2)
def _load(name: str, streaming: bool) -> Any:
    path, config, split = _parse(name)
    import datasets

    local = Path(path).exists()
    try:
        if local and _is_saved(Path(path)):
            if streaming:
                raise UserError(f"{name}: was written by save_to_disk; read it as {CACHED}{path}")
            found = datasets.load_from_disk(path)
        else:
            found = datasets.load_dataset(path, config, streaming=streaming)
    except UserError:
        raise
    except Exception as error:  # the library raises what each loader happens to
        raise UserError(f"{name}: {_advice(local, error)} ({_brief(error)})") from error
    if not isinstance(found, (datasets.DatasetDict, datasets.IterableDatasetDict)):
        return found
    if split is None and len(found) == 1:
        return next(iter(found.values()))
    if split is None or split not in found:
        raise UserError(f"{name}: name one of its splits: {', '.join(f'@{key}' for key in found)}")
    return found[split]


def _parse(name: str) -> tuple[str, str | None, str | None]:
    """(path or hub's name, config, split) of a name with its prefix."""
    rest, _, split = name.partition(":")[2].partition("@")
    path, _, config = rest.partition(":")
    if not path:
        raise UserError(f"{name}: expected {CACHED}NAME[:CONFIG][@SPLIT]")
    return path, config or None, split or None


def _is_saved(path: Path) -> bool:
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()


def _advice(local: bool, error: Exception) -> str:
    if local:
        return "datasets cannot load it"
    if isinstance(error, ConnectionError):
        return (
            "is no local path, not in datasets' cache, and the Hugging Face hub cannot be reached; "
            "without a network (or with HF_HUB_OFFLINE=1) give a local copy"
        )
    return "is no local path, and the Hugging Face hub does not give it"


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
