"""What a recipe file and flags say, and how wrong values are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packer.recipe import Recipe, load_recipe, parse_max_skip, parse_resize, parse_size
from packer.sample import PackError


def load(tmp_path: Path, text: str, flags: dict[str, dict[str, Any]] | None = None) -> Recipe:
    path = tmp_path / "recipe.toml"
    path.write_text(text, "utf-8")
    return load_recipe(path, flags or {})


def problems(tmp_path: Path, text: str, flags: dict[str, dict[str, Any]] | None = None) -> list[str]:
    """The lines of the message below the head, which names the file and counts them."""
    with pytest.raises(PackError) as caught:
        load(tmp_path, text, flags)
    head, *lines = str(caught.value).split("\n")
    assert head == f"{tmp_path / 'recipe.toml'}: {len(lines)} wrong value(s):"
    return [line.strip() for line in lines]


def test_nothing_said_gives_the_defaults() -> None:
    recipe = load_recipe(None, {"output": {"quality": None}, "run": {}})
    assert recipe == Recipe()
    assert (recipe.source.kind, recipe.output.format, recipe.output.image, recipe.run.on_error) == ("auto", "tar", "keep", "fail")
    assert recipe.transform.resize is None
    assert recipe.split.shares == {}


def test_everything_that_can_be_said(tmp_path: Path) -> None:
    text = """
[source]
kind = "csv"
classes = ["crack", "slag"]
exif = "ignore"
pixel_range = [0, 4095]
boxes = "clip"
max_pixels = 1000
max_file_bytes = "2MB"
columns = { path = "file", label = 1 }
[split]
train = 0.75
val = 0.25
group = "seam(\\\\d+)"
[transform]
resize = [640, 480]
mode = "stretch"
[output]
format = "memmap"
shard_size = "1.5 GiB"
shard_samples = 100
dtype = "float16"
normalize = [[0.5, 0.5, 0.5], [0.25, 0.25, 0.25]]
shuffle = false
seed = 7
[run]
workers = 2
on_error = "skip"
max_skip = "1%"
"""
    recipe = load(tmp_path, text)
    assert recipe.source.own == {"columns": {"path": "file", "label": 1}}
    assert recipe.source.classes == ["crack", "slag"]
    assert recipe.source.pixel_range == (0, 4095)
    assert recipe.source.max_file_bytes == 2_000_000
    assert recipe.split.shares == {"train": 0.75, "val": 0.25}
    assert recipe.split.group == "seam(\\d+)"
    assert recipe.transform.resize == (640, 480)
    assert recipe.output.shard_size == 3 * 2**29
    assert recipe.output.normalize == ((0.5,) * 3, (0.25,) * 3)
    assert not recipe.output.shuffle
    assert recipe.run.max_skip == 0.01


def test_a_flag_wins_over_the_file(tmp_path: Path) -> None:
    text = '[output]\nquality = 80\nseed = 3\n[transform]\nresize = "640"\n'
    recipe = load(tmp_path, text, {"output": {"quality": 70, "seed": None, "shuffle": False}, "transform": {"resize": "32x16"}})
    assert (recipe.output.quality, recipe.output.seed, recipe.output.shuffle) == (70, 3, False)
    assert recipe.transform.resize == (32, 16)


def test_a_flag_mends_a_wrong_value_of_the_file(tmp_path: Path) -> None:
    assert load(tmp_path, "[output]\nquality = 900\n", {"output": {"quality": 90}}).output.quality == 90


def test_a_wrong_flag_is_told_without_a_file() -> None:
    with pytest.raises(PackError, match=r"^options: 1 wrong value\(s\):\n  \[output\] quality: .*100, found 101$"):
        load_recipe(None, {"output": {"quality": 101}})


def test_a_byte_order_mark_is_read_over(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_bytes(b"\xef\xbb\xbf[output]\nseed = 5\n")
    assert load_recipe(tmp_path / "r.toml", {}).output.seed == 5


# Wrong values ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('[source]\nkind = "coco"', "[source] kind: Input should be 'auto', 'folder', 'voc' or 'csv', found 'coco'"),
        ("[source]\nclasses = []", "[source] classes: List should have at least 1 item after validation, not 0, found []"),
        ('[source]\nclasses = ["a", ""]', "[source] classes 1: String should have at least 1 character, found ''"),
        ('[source]\nclasses = ["a", "b", "a"]', "[source]: classes: a stands there twice"),
        ("[source]\nclasses = [1]", "[source] classes 0: Input should be a valid string, found 1"),
        ("[source]\npixel_range = [10, 10]", "[source]: pixel_range: expected [lo, hi] with 0 <= lo < hi <= 65535"),
        ("[source]\npixel_range = [0, 65536]", "[source]: pixel_range: expected [lo, hi] with 0 <= lo < hi <= 65535"),
        ("[source]\nmax_pixels = 0", "[source] max_pixels: Input should be greater than or equal to 1, found 0"),
        ("[split]\ntrain = 0.5\nval = 0.4", "[split]: the shares {'train': 0.5, 'val': 0.4} add up to 0.9, expected 1"),
        ("[split]\ntrain = 1.5\nval = -0.5", "[split] val: Input should be greater than or equal to 0, found -0.5"),
        ("[split]\ntrain = nan", "[split] train: Input should be greater than or equal to 0, found nan"),
        ('[split]\ngroup = "a"', "[split]: group needs shares, such as train = 0.8, val = 0.2"),
        (
            "[split]\ntrain = 1\ngroup = '('",
            "[split] group: '(' is no regular expression: missing ), unterminated subpattern at position 0",
        ),
        ('[output]\nshard_size = "big"', "[output] shard_size: 'big' is no size such as 256MB or 1GiB"),
        ("[output]\nshard_size = 0", "[output] shard_size: 0 is no size such as 256MB or 1GiB"),
        ("[output]\nshard_samples = 0", "[output] shard_samples: Input should be greater than or equal to 1, found 0"),
        ("[output]\nseed = -1", "[output] seed: Input should be greater than or equal to 0, found -1"),
        ("[output]\nseed = 9223372036854775808", "[output] seed: Input should be less than 9223372036854775808"),
        (
            '[output]\nrestart_grid = "lossless"\nimage = "jpg"',
            "[output]: restart_grid lossless belongs to format tar and image keep, where JPEGs keep their pixels",
        ),
        (
            '[output]\nrestart_grid = "lossless"\n[transform]\nresize = 640',
            "recipe: restart_grid lossless and resize exclude each other: a resized picture is encoded anew, grid included",
        ),
        ('[output]\nsubsampling = "411"', "[output] subsampling: Input should be '420' or '444', found '411'"),
        ('[output]\ndtype = "float32"', "[output]: dtype and normalize belong to format memmap; a tar holds encoded images"),
        ('[output]\nformat = "memmap"\nimage = "jpg"', "[output]: image belongs to format tar; a memmap holds decoded pixels"),
        ("[run]\nworkers = 0", "[run] workers: Input should be greater than or equal to 1, found 0"),
        ('[run]\nmax_skip = "0.5"', "[run] max_skip: '0.5' is neither a number of samples nor a share such as 1%"),
        (
            '[transform]\nresize = 640\nmode = "fit"',
            "[transform] mode: Input should be 'letterbox', 'stretch', 'crop', 'short' or 'long', found 'fit'",
        ),
        ('[transform]\nresize = "640x480"\nmode = "short"', "[transform]: mode 'short' takes one number, the length of the short side"),
        ("[output]\nfoo = 1", None),
        ("[foo]\na = 1", "[foo]: unknown table, expected one of source, split, transform, output, run"),
        ("output = 3", "[output]: Input should be a valid dictionary or instance of OutputTable, found 3"),
    ],
)
def test_a_wrong_value_is_named_with_its_table_and_key(tmp_path: Path, text: str, line: str | None) -> None:
    (found,) = problems(tmp_path, text)
    if line is None:
        assert found.startswith("[output] foo: unknown key, expected one of format, shard_size, ")
    else:
        assert found == line


def test_all_wrong_values_are_told_at_once(tmp_path: Path) -> None:
    text = '[source]\nkind = "coco"\n[output]\nquality = 0\nbar = 1\n[run]\nworkers = "many"\n[nonsense]\n'
    found = problems(tmp_path, text, {"transform": {"resize": "0"}})
    assert [line.partition(":")[0] for line in found] == [
        "[source] kind",
        "[transform] resize",
        "[output] quality",
        "[output] bar",
        "[run] workers",
        "[nonsense]",
    ]


@pytest.mark.parametrize("mode", ["short", "long"])
def test_a_memmap_needs_a_mode_of_one_size(tmp_path: Path, mode: str) -> None:
    text = f'[output]\nformat = "memmap"\n[transform]\nmode = "{mode}"\n'
    assert load(tmp_path, text).transform.resize is None
    (found,) = problems(tmp_path, text + "resize = 640\n")
    assert found.startswith(f"recipe: mode '{mode}' gives images of different sizes")


@pytest.mark.parametrize(
    "values",
    ["[[nan, 0, 0], [1, 1, 1]]", "[[0, 0, 0], [1, 0, 1]]", "[[0, 0, 0], [1, inf, 1]]", "[[123.7, 116.3, 103.5], [58.4, 57.1, 57.4]]"],
)
def test_normalize_is_on_the_scale_0_to_1(tmp_path: Path, values: str) -> None:
    (found,) = problems(tmp_path, f'[output]\nformat = "memmap"\ndtype = "float32"\nnormalize = {values}\n')
    assert found.startswith("[output]: normalize: expected means from 0 to 1 and stds over 0")


def test_normalize_needs_a_float_dtype(tmp_path: Path) -> None:
    (found,) = problems(tmp_path, '[output]\nformat = "memmap"\nnormalize = [[0, 0, 0], [1, 1, 1]]\n')
    assert found == '[output]: normalize needs dtype "float16" or "float32"'


@pytest.mark.parametrize("text", ["[output\n", "seed = = 1", "[output]\nseed = 1\nseed = 2\n", "a = " + "[" * 5000])
def test_no_toml_is_one_message(tmp_path: Path, text: str) -> None:
    with pytest.raises(PackError, match=r"recipe.toml: is no TOML file: ") as caught:
        load(tmp_path, text)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_no_utf8_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_bytes(b'[source]\nclasses = ["inclusi\xf3n"]\n')
    with pytest.raises(PackError, match=r"r.toml: is no TOML file: .*0xf3"):
        load_recipe(tmp_path / "r.toml", {})


def test_a_missing_file_or_a_folder_is_one_message(tmp_path: Path) -> None:
    with pytest.raises(PackError, match=r"nowhere.toml: cannot be read: No such file"):
        load_recipe(tmp_path / "nowhere.toml", {})
    with pytest.raises(PackError, match=r"cannot be read: Is a directory"):
        load_recipe(tmp_path, {})


# Sizes and shares -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("256MB", 256_000_000),
        ("1GiB", 2**30),
        (" 1.5 kib ", 1536),
        ("4096", 4096),
        (4096, 4096),
        ("1b", 1),
        ("2T", 2 * 10**12),
        ("0.5k", 500),
    ],
)
def test_sizes(text: int | str, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "MB", "-1", "1 XB", "1e9", "0", "0.4", "1,5MB", "1" * 400, -5, True, None])
def test_no_sizes(text: Any) -> None:
    with pytest.raises(ValueError, match="is no size such as 256MB or 1GiB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("640x480", (640, 480)),
        (" 640 X 480 ", (640, 480)),
        ("640,480", (640, 480)),
        ("640", 640),
        (640, 640),
        ([640, 480], (640, 480)),
        (None, None),
    ],
)
def test_resize(value: Any, expected: Any) -> None:
    assert parse_resize(value) == expected


@pytest.mark.parametrize(
    "value", ["0", "640x0", "640x", "x480", "640x480x3", "-640", "65501", "9" * 5000, [640, 480, 3], [], ["640", 480], 640.5, True, 0]
)
def test_no_resize(value: Any) -> None:
    with pytest.raises(ValueError, match="is no size such as 640x480 or 640"):
        parse_resize(value)
    with pytest.raises(PackError, match=r"^options: 1 wrong value\(s\):\n  \[transform\] resize: .* is no size"):
        load_recipe(None, {"transform": {"resize": value}})


@pytest.mark.parametrize(
    ("value", "expected"), [("20", 20), (20, 20), ("1%", 0.01), (" 2.5 % ", 0.025), (0.01, 0.01), ("0", 0), ("100%", 1.0), (None, None)]
)
def test_max_skip(value: Any, expected: Any) -> None:
    assert parse_max_skip(value) == expected
    loaded = load_recipe(None, {"run": {"max_skip": value}}).run.max_skip
    assert (loaded, type(loaded)) == (expected, type(expected))


@pytest.mark.parametrize("value", ["0.5", "101%", "-1", "%", "many", -1, 1.5, float("nan"), True, [1]])
def test_no_max_skip(value: Any) -> None:
    with pytest.raises(PackError, match=r"\[run\] max_skip: .* is neither a number of samples nor a share such as 1%"):
        load_recipe(None, {"run": {"max_skip": value}})


anything: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=5,
)
keys = st.sampled_from([(table, key) for table, fields in Recipe() for key in type(fields).model_fields])


@settings(deadline=None)
@given(keys, anything)
def test_any_value_is_taken_or_named(place: tuple[str, str], value: Any) -> None:
    table, key = place
    message = ""
    try:
        load_recipe(None, {table: {key: value}})
    except PackError as e:
        message = str(e)
    assert not message or (f"[{table}]" in message and (key in message or "shares" in message))
