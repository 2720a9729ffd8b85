import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from rollfarm.config import ConfigError
from rollfarm.records import Source, check_available, order, parts, read_records

needs_library = pytest.mark.skipif(find_spec("datasets") is None, reason="needs datasets")

ROWS = [{"question": f"{n} plus 1", "answer": str(n + 1), "level": n} for n in range(4)]


def jsonl(path: Path, *lines: str) -> Source:
    path.write_text("\n".join(lines) + "\n")
    return Source(str(path))


def test_a_jsonl_file_is_read_in_order_and_blank_lines_are_none(tmp_path: Path):
    source = jsonl(tmp_path / "rows.jsonl", json.dumps(ROWS[0]), "", json.dumps(ROWS[1]))

    assert read_records(source) == ROWS[:2]


@needs_library
def test_a_parquet_file_is_read_like_the_same_in_jsonl(tmp_path: Path):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet")

    assert read_records(Source(str(tmp_path / "rows.parquet"))) == ROWS


@needs_library
def test_the_hub_s_library_loads_a_folder_by_its_name_split_by_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "sums"
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "test.jsonl").write_text(json.dumps(ROWS[3]) + "\n")

    assert read_records(Source(str(folder), split="test")) == [ROWS[3]]
    with pytest.raises(ConfigError, match=r"not to be had from the hub.*split 'tset'"):
        read_records(Source(str(folder), split="tset"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.jsonl", None, "no such file. Correct the path"),
        ("empty.jsonl", b"\n", "it has no records"),
        ("cut.jsonl", b'{"a": 1}\n{"a": \n', "cut.jsonl, line 2: no JSON"),
        ("list.jsonl", b'{"a": 1}\n\n[1]\n', "list.jsonl, line 3: list, not an object"),
        ("latin.jsonl", b'{"a": "\xe9"}\n', "not UTF-8"),
        ("text.parquet", b"not parquet at all", "no parquet file"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_place(
    tmp_path: Path, name: str, content: bytes | None, message: str
):
    if name.endswith(".parquet") and find_spec("pyarrow") is None:
        pytest.skip("needs pyarrow")
    if content is not None:
        (tmp_path / name).write_bytes(content)

    with pytest.raises(ConfigError) as wrong:
        read_records(Source(str(tmp_path / name)))

    assert message in str(wrong.value)


def test_a_file_is_looked_for_and_not_read_until_its_records_are_wanted(tmp_path: Path):
    check_available(jsonl(tmp_path / "cut.jsonl", '{"a": '))
    with pytest.raises(ConfigError, match=r"missing\.jsonl: no such file"):
        check_available(Source(str(tmp_path / "missing.jsonl")))


def test_an_epoch_is_every_record_once_in_an_order_that_is_the_same_each_time_and_another_in_the_next():
    first, second = order(50, 7, 0), order(50, 7, 1)

    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert first == order(50, 7, 0)
    assert first != order(50, 8, 0)


@pytest.mark.parametrize(
    ("count", "share", "held"), [(100, 0.05, 5), (100, 0.0, 0), (3, 0.05, 1), (1, 0.5, 0), (2, 0.99, 1)]
)
def test_the_held_out_part_is_as_large_as_asked_and_the_rest_trains(count: int, share: float, held: int):
    training, validation = parts(count, share, 3)

    assert len(validation) == held
    assert sorted([*training, *validation]) == list(range(count))
