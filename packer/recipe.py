"""What to pack and how, as a user writes it: a recipe file (TOML), with command line flags on top of it."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from packer.sample import MAX_CLASS_CHARS, UsageError

MAX_SIDE = 65500
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_size(value: int | str) -> int:
    """Bytes of "256MB", "1.5 GiB", "4096" or 4096."""
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d+)?)\s*([kmgt]i?|)b?\s*", str(value).lower())
    if not match or float(match[1]) * _UNITS[match[2]] < 1:
        raise ValueError(f"{value!r} is no size such as 256MB or 1GiB")
    return int(float(match[1]) * _UNITS[match[2]])


def parse_resize(value: Any) -> int | tuple[int, int] | None:
    """(width, height) of "640x480" or [640, 480], N of "640" or 640; each 1 to 65500."""
    if value is None:
        return None
    sides = value if isinstance(value, (list, tuple)) else [value]
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d{1,6})\s*(?:[xX,]\s*(\d{1,6}))?\s*", value)
        sides = [int(side) for side in match.groups() if side] if match else []
    if len(sides) not in (1, 2) or not all(type(side) is int and 1 <= side <= MAX_SIDE for side in sides):
        raise ValueError(f"{value!r} is no size such as 640x480 or 640, each side a whole number from 1 to {MAX_SIDE}")
    return (sides[0], sides[1]) if len(sides) == 2 else int(sides[0])


def _regex(value: str) -> str:
    try:
        re.compile(value)
    except re.error as e:
        raise ValueError(f"{value!r} is no regular expression: {e}") from None
    return value


def parse_max_skip(value: Any) -> int | float | None:
    """A number of samples of "20" or 20 (int), a share from 0 to 1 of "1%" or 0.01 (float)."""
    number = value
    if isinstance(value, str) and (match := re.fullmatch(r"\s*(?:(\d{1,15})|(\d{1,3}(?:\.\d+)?)\s*%)\s*", value)):
        number = int(match[1]) if match[1] else float(match[2]) / 100
    if number is None or (type(number) is int and number >= 0):
        return number
    if type(number) is float and 0 <= number <= 1:
        return number
    raise ValueError(f"{value!r} is neither a number of samples nor a share such as 1%")


Triple = tuple[float, float, float]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SourceTable(_Table):
    """``[source]``; keys that are not named here belong to the source's own options and are checked by it."""

    model_config = ConfigDict(extra="allow", frozen=True)
    kind: Literal["auto", "folder", "voc", "csv"] = "auto"
    classes: Annotated[list[Annotated[str, Field(min_length=1, max_length=MAX_CLASS_CHARS)]], Field(min_length=1)] | None = None
    exif: Literal["auto", "apply", "ignore"] = "auto"
    pixel_range: tuple[int, int] | None = None
    boxes: Literal["fail", "clip"] = "fail"
    max_pixels: Annotated[int, Field(ge=1)] = 200_000_000
    max_file_bytes: Annotated[int, BeforeValidator(parse_size)] = 1 << 30

    @model_validator(mode="after")
    def _sound(self) -> SourceTable:
        if self.classes is not None and len(set(self.classes)) != len(self.classes):
            twice = sorted({c for c in self.classes if self.classes.count(c) > 1})
            raise ValueError(f"classes: {', '.join(twice)} stands there twice")
        if self.pixel_range is not None and not 0 <= self.pixel_range[0] < self.pixel_range[1] <= 65535:
            raise ValueError("pixel_range: expected [lo, hi] with 0 <= lo < hi <= 65535")
        return self

    @property
    def own(self) -> dict[str, Any]:
        """The source's own options."""
        return dict(self.model_extra or {})


class SplitTable(_Table):
    """``[split]``: shares of the splits, used only where the source has none."""

    train: Annotated[float, Field(ge=0)] = 0
    val: Annotated[float, Field(ge=0)] = 0
    test: Annotated[float, Field(ge=0)] = 0
    group: Annotated[str, AfterValidator(_regex)] | None = None

    @model_validator(mode="after")
    def _sum(self) -> SplitTable:
        total = sum(self.shares.values())
        if self.shares and abs(total - 1) > 1e-6:
            raise ValueError(f"the shares {self.shares} add up to {total:g}, expected 1")
        if self.group is not None and not self.shares:
            raise ValueError("group needs shares, such as train = 0.8, val = 0.2")
        return self

    @property
    def shares(self) -> dict[str, float]:
        return {k: v for k, v in (("train", self.train), ("val", self.val), ("test", self.test)) if v > 0}


class TransformTable(_Table):
    """``[transform]``."""

    resize: Annotated[int | tuple[int, int] | None, BeforeValidator(parse_resize)] = None
    mode: Literal["letterbox", "stretch", "crop", "short", "long"] = "letterbox"

    @model_validator(mode="after")
    def _one_number(self) -> TransformTable:
        if self.mode in ("short", "long") and isinstance(self.resize, tuple):
            raise ValueError(f"mode {self.mode!r} takes one number, the length of the {self.mode} side")
        return self


class OutputTable(_Table):
    """``[output]``."""

    format: Literal["tar", "memmap"] = "tar"
    shard_size: Annotated[int | None, BeforeValidator(lambda v: None if v is None else parse_size(v))] = None
    shard_samples: Annotated[int, Field(ge=1)] | None = None
    image: Literal["keep", "jpg", "png", "webp"] = "keep"
    quality: Annotated[int, Field(ge=1, le=100)] = 90
    subsampling: Literal["420", "444"] = "420"
    restart_grid: bool | Literal["lossless"] = True
    dtype: Literal["uint8", "float16", "float32"] = "uint8"
    normalize: tuple[Triple, Triple] | None = None
    shuffle: bool = True
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0

    @model_validator(mode="after")
    def _fits_layout(self) -> OutputTable:
        if self.format == "tar" and (self.dtype != "uint8" or self.normalize is not None):
            raise ValueError("dtype and normalize belong to format memmap; a tar holds encoded images")
        if self.format == "memmap" and self.image != "keep":
            raise ValueError("image belongs to format tar; a memmap holds decoded pixels")
        if self.restart_grid == "lossless" and (self.format, self.image) != ("tar", "keep"):
            raise ValueError("restart_grid lossless belongs to format tar and image keep, where JPEGs keep their pixels")
        if self.normalize is not None and self.dtype == "uint8":
            raise ValueError('normalize needs dtype "float16" or "float32"')
        if self.normalize is not None and not all(0 <= m <= 1 and 0 < s < math.inf for m, s in zip(*self.normalize, strict=True)):
            raise ValueError(f"normalize: expected means from 0 to 1 and stds over 0, for pixels divided by 255; found {self.normalize}")
        return self


class RunTable(_Table):
    """``[run]``: how the work is done; never changes a byte of the result."""

    workers: Annotated[int, Field(ge=1, le=4096)] | None = None
    engine: Literal["local"] = "local"
    on_error: Literal["fail", "skip"] = "fail"
    max_skip: Annotated[int | float | None, BeforeValidator(parse_max_skip)] = None


class Recipe(_Table):
    """All tables. `source`, `split`, `transform` and `output` decide the bytes, `run` does not."""

    source: SourceTable = SourceTable()
    split: SplitTable = SplitTable()
    transform: TransformTable = TransformTable()
    output: OutputTable = OutputTable()
    run: RunTable = RunTable()
    _name: str = PrivateAttr("options")

    @property
    def name(self) -> str:
        """What a message calls it: its file, or "options"."""
        return self._name

    @model_validator(mode="after")
    def _together(self) -> Recipe:
        if self.output.restart_grid == "lossless" and self.transform.resize is not None:
            raise ValueError("restart_grid lossless and resize exclude each other: a resized picture is encoded anew, grid included")
        if self.output.format == "memmap" and self.transform.resize is not None and self.transform.mode in ("short", "long"):
            raise ValueError(f"mode {self.transform.mode!r} gives images of different sizes; a memmap needs letterbox, stretch or crop")
        return self


def load_recipe(path: Path | None, flags: Mapping[str, Mapping[str, Any]]) -> Recipe:
    """Read a recipe file, if any, put the flags (table -> key -> value, None = not given) on top, and check the whole.

    Raises:
        UsageError: unreadable, no TOML, or wrong values: all of them, each with its table and key.
    """
    raw: dict[str, Any] = {}
    if path is not None:
        try:
            raw = tomllib.loads(path.read_text("utf-8-sig"))
        except OSError as e:
            raise UsageError(f"{path}: cannot be read: {e.strerror}") from None
        except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as e:
            raise UsageError(f"{path}: is no TOML file: {e}") from None
    for table, values in flags.items():
        given = {k: v for k, v in values.items() if v is not None}
        if given and isinstance(raw.setdefault(table, {}), dict):
            raw[table] = {**raw[table], **given}
    try:
        recipe = Recipe.model_validate(raw)
    except ValidationError as e:
        lines = [f"  {_place(p['loc'])}: {_message(p)}" for p in e.errors()]
        raise UsageError(f"{path or 'options'}: {len(lines)} wrong value(s):\n" + "\n".join(lines)) from None
    recipe._name = str(path or "options")
    mode = flags.get("transform", {}).get("mode")
    if mode is not None and recipe.transform.resize is None:  # in a file it may wait for a --resize
        raise UsageError(f"--mode {mode} says how to resize: give --resize too, such as --resize 640")
    return recipe


def _place(loc: tuple[int | str, ...]) -> str:
    return " ".join([f"[{loc[0]}]", *map(str, loc[1:])]) if loc else "recipe"


def _message(problem: Any) -> str:
    if problem["type"] == "extra_forbidden":
        table, *key = problem["loc"]
        what, known = ("key", type(getattr(Recipe(), table)).model_fields) if key else ("table", Recipe.model_fields)
        return f"unknown {what}, expected one of {', '.join(known)}"
    message = str(problem["msg"]).removeprefix("Value error, ")
    value = repr(problem["input"])
    return (
        message if len(value) > 80 or value in message or isinstance(problem["input"], (dict, BaseModel)) else f"{message}, found {value}"
    )
