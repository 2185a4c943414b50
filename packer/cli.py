"""The command line: options to objects, one library call, one summary. No decision about data is made here."""

from __future__ import annotations

import io
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click

from loaders.format import FormatError
from packer.sample import Finding, PackError, UsageError

F = TypeVar("F", bound=Callable[..., Any])
FOLDER = click.Path(path_type=Path, readable=False)  # the library says what cannot be read, and `check --json` in JSON


class _Commands(click.Group):
    """Turns what the library raises into one message and an exit status; no traceback reaches a user."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except UsageError as e:
            _fail(str(e), 2)
        except (PackError, FormatError) as e:
            _fail(str(e))
        except KeyboardInterrupt:
            _interrupted("nothing was begun")
        except BrokenPipeError:  # the reader of our output has gone
            sys.stderr.close()
            ctx.exit(1)
        except Exception as e:
            from packer.engines.local import explain

            _fail(explain(e, "the output"))


def _interrupted(message: str) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # impatience must not cut the message short
    _fail(f"interrupted; {message}")


def _fail(message: str, status: int = 1) -> NoReturn:
    click.echo(f"error: {message}", err=True)
    raise SystemExit(status)


def _terminate(*_: object) -> NoReturn:
    raise KeyboardInterrupt


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="shardpack")
def main() -> None:
    """Pack an image data set once; train on it without waiting and without broken samples."""
    signal.signal(signal.SIGTERM, _terminate)
    for stream in (sys.stdout, sys.stderr):  # a name may hold what the terminal's encoding cannot say
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def recipe_options(command: F) -> F:
    """Options that `build` and `check` share: what to read and how it will be packed."""
    options = [
        click.option(
            "--recipe", type=click.Path(dir_okay=False, path_type=Path), help="A TOML file that says what the flags say; a flag wins."
        ),
        click.option(
            "--source",
            "kind",
            type=click.Choice(["auto", "folder", "voc", "csv"]),
            help="Kind of the source. [default: detected, and said]",
        ),
        click.option("--classes", type=click.Path(dir_okay=False, path_type=Path), help="Text file, one class name a line, in id order."),
        click.option(
            "--split", "shares", metavar="SHARES", help="Such as train=0.8,val=0.1,test=0.1; only where the source has no splits."
        ),
        click.option("--group", metavar="REGEX", help="Samples whose path gives the same group stay in one split."),
        click.option("--format", "layout", type=click.Choice(["tar", "memmap"]), help="WebDataset shards or numpy arrays. [default: tar]"),
        click.option("--resize", metavar="WxH|N", help="Resize every picture to W by H pixels, or to N (see --mode)."),
        click.option(
            "--mode",
            type=click.Choice(["letterbox", "stretch", "crop", "short", "long"]),
            help="How to resize: keep the aspect and fill, stretch, cut the middle, or make the short or long side N. [default: letterbox]",
        ),
        click.option(
            "--boxes", type=click.Choice(["fail", "clip"]), help="What to do with boxes that reach outside the picture. [default: fail]"
        ),
        click.option("--workers", type=click.IntRange(1), help="Worker processes. [default: the cores this process may use]"),
        click.option("--engine", type=click.Choice(["local"]), help="Who runs the work. [default: local]"),
        click.option(
            "--on-error",
            type=click.Choice(["fail", "skip"]),
            help="With a sample that cannot be packed: publish nothing, or leave it out. [default: fail]",
        ),
        click.option("--max-skip", metavar="N|P%", help="Fail all the same when more than this many (or this share) are left out."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@main.command()
@click.argument("src", type=FOLDER)
@click.argument("out", type=FOLDER)
@recipe_options
@click.option("--image", type=click.Choice(["keep", "jpg", "png", "webp"]), help="Format of stored images (tar). [default: keep]")
@click.option("--quality", type=click.IntRange(1, 100), help="Quality of images that are encoded anew. [default: 90]")
@click.option("--subsampling", type=click.Choice(["420", "444"]), help="Chroma of JPEGs that are encoded anew. [default: 420]")
@click.option(
    "--restart-grid",
    type=click.Choice(["on", "off", "lossless"]),
    help="Restart markers, for cropped decoding, in JPEGs that are encoded anew; lossless: also in those that are kept. [default: on]",
)
@click.option("--no-restart-grid", "restart_grid", flag_value="off", help="The same as --restart-grid off.")
@click.option("--dtype", type=click.Choice(["uint8", "float16", "float32"]), help="Element type of images (memmap). [default: uint8]")
@click.option("--normalize", nargs=2, metavar="MEAN STD", help="Per channel, such as 0.485,0.456,0.406 0.229,0.224,0.225 (memmap, float).")
@click.option("--shard-size", metavar="SIZE", help="Target size of a shard. [default: 256MB, less where the set is small]")
@click.option("--shard-samples", type=click.IntRange(1), help="Samples per shard, instead of a size.")
@click.option("--shuffle/--no-shuffle", default=None, help="Shuffle within each split before cutting shards. [default: on]")
@click.option("--seed", type=click.IntRange(0), help="Seed of the shuffle and of --split. [default: 0]")
@click.option("--overwrite", is_flag=True, help="Replace a finished data set at OUT, once the new one is complete.")
@click.option("--quiet", is_flag=True, help="Only findings and errors.")
def build(src: Path, out: Path, overwrite: bool, quiet: bool, **options: Any) -> None:
    """Pack the data set in folder SRC into folder OUT.

    The same command again goes on where an interrupted one stopped. Exit status: 0 done, 1 the data has problems or the job failed,
    2 wrong usage.
    """
    from packer.build import build as run_build
    from packer.console import Terminal

    console = Terminal(quiet=quiet)
    try:
        outcome = run_build(src, out, _recipe(options), console, overwrite=overwrite)
    except KeyboardInterrupt:
        _interrupted("what is finished is kept: the same command again goes on from there")
    if not outcome.ok:
        _fail(outcome.message)
    if outcome.message:
        console.say(outcome.message)
    elif outcome.manifest is not None:
        for name, split in sorted(outcome.manifest.splits.items()):
            console.say(f"{name}: {split.num_samples:,} samples in {len(split.shards):,} shard(s)")
        console.say(
            f"packed {outcome.num_samples:,} samples into {out}; {outcome.num_skipped:,} left out. Check it with: pack verify {out}"
        )


@main.command()
@click.argument("src", type=FOLDER)
@recipe_options
@click.option("--near-duplicates", is_flag=True, help="Also name pictures that look like another: resized, re-encoded, a little brighter.")
@click.option("--json", "as_json", is_flag=True, help="Print {findings, num_samples, num_skipped} for machines.")
@click.option("--quiet", is_flag=True, help="Only findings and errors.")
def check(src: Path, near_duplicates: bool, as_json: bool, quiet: bool, **options: Any) -> None:
    """Say everything that build would say about SRC; write nothing."""
    from packer.build import check as run_check
    from packer.console import Terminal
    from packer.findings import as_dict

    try:
        outcome = run_check(src, _recipe(options), Terminal(quiet=quiet or as_json), near_duplicates=near_duplicates)
    except KeyboardInterrupt:
        _interrupted("nothing was written")
    except PackError as e:
        if as_json:  # machines get their answer in any case
            problem = Finding("error", "cannot-pack", ".", str(e))
            click.echo(json.dumps({"findings": [as_dict(problem)], "num_samples": 0, "num_skipped": 0}, indent=1))
        raise
    if as_json:
        found = [as_dict(f) for f in outcome.findings or ()]
        click.echo(json.dumps({"findings": found, "num_samples": outcome.num_samples, "num_skipped": outcome.num_skipped}, indent=1))
    if not outcome.ok:
        _fail(outcome.message)
    if not as_json:
        click.echo(f"{outcome.num_samples:,} samples can be packed, {outcome.num_skipped:,} would be left out")


@main.command()
@click.argument("out", type=FOLDER)
@click.option("--quick", is_flag=True, help="Names, sizes, structure and index only: no checksums, no decoding.")
@click.option("--workers", type=click.IntRange(1), help="Worker processes. [default: the cores this process may use]")
@click.option("--json", "as_json", is_flag=True, help="Print {ok, problems} for machines.")
@click.option("--quiet", is_flag=True, help="Only problems.")
def verify(out: Path, quick: bool, workers: int | None, as_json: bool, quiet: bool) -> None:
    """Check every byte of the packed data set in folder OUT; exit status 1 when something is wrong."""
    from packer.build import default_workers
    from packer.console import Terminal
    from packer.engines import open_engine
    from packer.problems import as_json as to_json
    from packer.problems import as_lines, cannot_verify
    from packer.verify import verify as run_verify

    console = Terminal(quiet=quiet or as_json)
    try:
        problems = run_verify(out, open_engine("local", workers or default_workers()), quick=quick, progress=console.progress)
    except KeyboardInterrupt:
        _interrupted("nothing was changed")
    except PackError as e:
        if as_json:
            click.echo(json.dumps(to_json([cannot_verify(str(e))]), indent=1))
        raise
    errors = [p for p in problems if p.level == "error"]
    if as_json:
        click.echo(json.dumps(to_json(problems), indent=1))
    else:
        for line in as_lines(problems):
            console.finding(line)
    if errors:
        _fail(f"{out}: {len(errors):,} problem(s)")
    if not as_json and not quiet:
        click.echo(f"{out}: sound" + (" (quick look: no checksums, no decoding)" if quick else ""))


@main.command()
@click.argument("out", type=FOLDER)
@click.option("--shuffle", is_flag=True, help="Add how well training mixes the samples, beside webdataset's shuffle(1000).")
@click.option("--batch-size", type=click.IntRange(min=2), default=256, help="For --shuffle: samples a step, over all ranks. Default: 256.")
def info(out: Path, shuffle: bool, batch_size: int) -> None:
    """Say what the packed data set in folder OUT holds."""
    from packer.info import describe
    from packer.shuffling import describe_shuffle

    for line in describe(out):
        click.echo(line)
    if shuffle:
        click.echo("")
        for line in describe_shuffle(out, batch_size):
            click.echo(line)


@main.command()
@click.argument("out", type=FOLDER)
@click.option("--split", default="train", help="Default: train.")
@click.option("--batch-size", type=click.IntRange(1), default=64, help="That training wants. Default: 64.")
@click.option("--seconds", type=click.FloatRange(1, 3600), default=60.0, help="For all measurements together. Default: 60.")
@click.option(
    "--size", type=click.IntRange(1), help="Crop (detection: letterbox) pictures to N by N while loading. [default: only where they differ]"
)
@click.option("--plot", "plot_path", type=click.Path(dir_okay=False, path_type=Path), help="Draw the result into this PNG.")
@click.option("--json", "as_json", is_flag=True, help="Print the result for machines.")
@click.option("--quiet", is_flag=True, help="Only the result.")
def bench(
    out: Path, split: str, batch_size: int, seconds: float, size: int | None, plot_path: Path | None, as_json: bool, quiet: bool
) -> None:
    """Measure which loader settings are fastest for the packed data set in folder OUT on this machine."""
    from packer.bench import bench as run_bench
    from packer.bench import plot
    from packer.console import Terminal

    with Terminal(quiet=quiet or as_json).status() as status:
        report = run_bench(out, split, batch_size, seconds, size, status)
    if plot_path is not None:
        plot(report, plot_path)
    if as_json:
        click.echo(json.dumps(report.as_dict(), indent=1))
    else:
        for line in report.lines():
            click.echo(line)


def _recipe(options: dict[str, Any]) -> Any:
    """The recipe file with the flags on top."""
    from packer.recipe import load_recipe

    o = options.get
    normalize = o("normalize") or None
    flags = {
        "source": {"kind": o("kind"), "classes": _read_classes(o("classes")), "boxes": o("boxes")},
        "split": {**_shares(o("shares")), "group": o("group")},
        "transform": {"resize": o("resize"), "mode": o("mode")},
        "output": {
            "format": o("layout"),
            "normalize": None if normalize is None else [_numbers(v) for v in normalize],
            **{k: o(k) for k in ("image", "quality", "subsampling", "restart_grid", "dtype")},
            **{k: o(k) for k in ("shard_size", "shard_samples", "shuffle", "seed")},
        },
        "run": {k: o(k) for k in ("workers", "engine", "on_error", "max_skip")},
    }
    return load_recipe(o("recipe"), flags)


def _read_classes(path: Path | None) -> list[str] | None:
    if path is None:
        return None

    def wrong(message: str) -> click.BadParameter:
        return click.BadParameter(f"{path}{message}", param_hint="--classes")

    data = b""
    try:
        data = path.read_bytes()
        names = [line.strip() for line in data.decode("utf-8-sig").rstrip().splitlines()]
    except OSError as e:
        raise wrong(f": cannot be read: {e.strerror}") from None
    except UnicodeDecodeError as e:
        line = e.object[: e.start].count(b"\n") + 1
        raise wrong(f", line {line}: byte 0x{e.object[e.start]:02x} is not text in UTF-8; save the file as UTF-8") from None
    if not names:
        raise wrong(": holds no class name")
    for number, name in enumerate(names, 1):  # a line's position is its class id
        if not name:
            raise wrong(f", line {number}: is blank, and a line's position is the class id: take it out, or write the missing name")
        if name.startswith("#"):
            raise wrong(
                f", line {number}: {name[:80]!r} would become class {number - 1}: the file has no comments, take the line out "
                "(a class of that name: classes = [...] in a recipe)"
            )
    return names


def _shares(text: str | None) -> dict[str, str]:
    if text is None:
        return {}
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(equals for _, equals, _ in pairs):
        raise click.BadParameter(f"{text!r} is not like train=0.8,val=0.1,test=0.1", param_hint="--split")
    return {name.strip(): value.strip() for name, _, value in pairs}


def _numbers(text: str) -> list[float]:
    try:
        values = [float(v) for v in text.split(",")]
    except ValueError:
        raise click.BadParameter(f"{text!r} is not like 0.485,0.456,0.406", param_hint="--normalize") from None
    return values * 3 if len(values) == 1 else values


if __name__ == "__main__":
    main()
