"""The workloads that are contests: what is loaded, by whom. Each function prepares its data and names the contestants.

All contestants of a workload get the same pictures, batch size, augmentation and number of threads or worker processes, and give uint8
batches. `target` is what our rate divided by theirs should reach on two cores.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from contest import Contestant
from data import Data
from loaders.format import open_index, read_manifest

HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}


@dataclass(frozen=True)
class Workload:
    """`title`: a line for the table. `contestants`: prepares the data, says who takes part; ours first. None where a program lacks."""

    title: str
    contestants: Callable[[Data], list[Contestant]]


def _ours(root: Path, layout: str, batch: int, workers: int, **more: Any) -> Contestant:
    arguments = {"root": str(root), "layout": layout, "batch": batch, "workers": workers, **more}
    return Contestant("BatchLoader", "ours.py", "batch_loader", arguments, role="ours")


def _both(root: Path, batch: int, workers: int, transform: str, **more: Any) -> list[Contestant]:
    """Ours with processes, and with threads: of tars, where each picture is transformed."""
    threads = _ours(root, "tar", batch, workers, transform=transform, **more)
    processes = replace(threads, name="BatchLoader, processes=True", arguments={**threads.arguments, "processes": True})
    return [processes, replace(threads, name="BatchLoader, threads", role="peer")]


def _ceiling(name: str, builder: str, arguments: Mapping[str, Any], target: float | None, exact: bool = False) -> Contestant:
    return Contestant(name, "bare.py", builder, arguments, role="ceiling", target=target, exact=exact, whole=False)


def _data_loader(name: str, builder: str, target: float | None = None, exact: bool = False, **arguments: Any) -> Contestant:
    return Contestant(f"DataLoader, {name}", "peer_torch.py", builder, arguments, target=target, exact=exact)


def _workers(count: int) -> str:
    return f"{count} workers" if count else "no workers"


def memmap224(data: Data) -> list[Contestant]:
    batch = 256
    root = data.pack(data.photos(data.count(8192, batch)), "folder", "--format", "memmap", "--resize", "224", "--mode", "stretch")
    found = [_ours(root, "memmap", batch, data.workers)]
    for batched in (False, True):
        for workers in (0, data.workers):
            name = f"{'__getitems__' if batched else 'item'}, {_workers(workers)}"
            arguments = {"root": str(root), "batch": batch, "workers": workers, "batched": batched}
            found.append(_data_loader(name, "memmap", 5.0, True, **arguments))
            huge = f"DataLoader, {name}, THP_MEM_ALLOC_ENABLE=1"
            found.append(Contestant(huge, "peer_torch.py", "memmap", arguments, environment=HUGE_PAGES, target=2.0, exact=True))
    ceiling = {"root": str(root), "batch": batch}
    return [*found, _ceiling("np.copyto of the batch's bytes, 1 thread", "copyto", ceiling, 0.85)]


def memmap32(data: Data) -> list[Contestant]:
    batch = 512
    raw = data.cifar(data.count(50176, batch))
    root = data.pack(raw, "folder", "--format", "memmap")
    threads = replace(_ours(root, "memmap", batch, data.workers), name="BatchLoader, threads", role="peer", exact=True)
    found = [replace(_ours(root, "memmap", batch, 0), name="BatchLoader, workers=0"), threads]
    for batched in (False, True):
        for workers in (0, data.workers):
            name = f"{'__getitems__' if batched else 'item'}, {_workers(workers)}"
            arguments = {"root": str(root), "batch": batch, "workers": workers, "batched": batched}
            found.append(_data_loader(name, "memmap", 1.2, True, **arguments))
    if beton := data.ffcv(raw, "raw"):
        found.append(_ffcv("FFCV, raw", beton, batch, data.workers, 1.8, exact=True))
    arguments = {"root": str(root), "batch": batch}
    return [*found, _ceiling("index_select over two tensors", "index_select", arguments, 0.65, exact=True)]


def tar32(data: Data) -> list[Contestant]:
    batch = 512
    root = data.pack(data.cifar(data.count(50176, batch)), "folder")
    found = [_ours(root, "tar", batch, data.workers)]
    for batched in (False, True):
        for workers in (0, data.workers):
            name = f"{'gather' if batched else 'item'}, {_workers(workers)}, same ShardDataset"
            found.append(_data_loader(name, "packed", 2.0, True, root=str(root), batch=batch, workers=workers, batched=batched))
    found.append(_webdataset(root, batch, data.workers, None, exact=True))
    arguments = {"root": str(root), "batch": batch, "threads": data.workers, "side": 32}
    return [*found, _ceiling(f"simplejpeg alone, {data.workers} threads", "decode_only", arguments, None, exact=True)]


def _ffcv(name: str, beton: Path, batch: int, workers: int, target: float | None, crop: int = 0, exact: bool = False) -> Contestant:
    arguments = {"path": str(beton), "batch": batch, "workers": workers, "crop": crop}
    note = "its batches are overwritten by later ones" + (", INTER_AREA" if crop else "")
    return Contestant(name, "peer_ffcv.py", "loader", arguments, venv="ffcv", target=target, exact=exact, note=note)


def _webdataset(root: Path, batch: int, workers: int, target: float | None, crop: int = 0, exact: bool = False) -> Contestant:
    arguments = {"root": str(root), "batch": batch, "workers": workers, "crop": crop}
    name = f"webdataset, cv2, {_workers(workers)}"
    return Contestant(name, "peer_webdataset.py", "loader", arguments, target=target, exact=exact)


def _bare_crop(root: Path, batch: int, threads: int, target: float | None) -> Contestant:
    arguments = {"root": str(root), "batch": batch, "threads": threads}
    return _ceiling(f"cv2 decode and crop, {threads} threads", "decode_and_crop", arguments, target)


def photos_original(data: Data) -> list[Contestant]:
    batch, workers = 64, data.workers
    num = data.count(4864, batch)
    raw = data.photos(num)
    root = data.pack(raw, "folder")
    found = [
        *_both(root, batch, workers, "crop224"),
        _bare_crop(root, batch, workers, 0.97),
        _data_loader(f"cv2 on the files, {_workers(workers)}", "files_crop", 1.22, root=str(raw), batch=batch, workers=workers),
        _webdataset(root, batch, workers, 1.3, crop=224),
        *_dali(data, root, num, batch, 1.6),
    ]
    for name, path in (("mds", data.mds(raw)), ("litdata", data.litdata(raw))):
        if path is not None:
            arguments = {"path": str(path), "batch": batch, "workers": workers, "crop": 224}
            title = "mosaicml-streaming" if name == "mds" else name
            found.append(Contestant(f"{title}, cv2, {_workers(workers)}", "peer_streaming.py", name, arguments, venv="peers", whole=False))
    return found


def photos_lossless(data: Data) -> list[Contestant]:
    """The peers get the files and tars without restart markers, which cost them a few per cent."""
    batch, workers = 64, data.workers
    num = data.count(4864, batch)
    raw = data.photos(num)
    if shutil.which("jpegtran") is None:
        return []
    plain, root = data.pack(raw, "folder"), data.pack(raw, "folder", "--restart-grid", "lossless")
    found = [
        *_both(root, batch, workers, "crop224"),
        _bare_crop(plain, batch, workers, None),
        _data_loader(f"cv2 on the files, {_workers(workers)}", "files_crop", root=str(raw), batch=batch, workers=workers),
        _webdataset(plain, batch, workers, None, crop=224),
    ]
    return [*found, *_dali(data, plain, num, batch, None)]


def _dali(data: Data, root: Path, num: int, batch: int, target: float | None) -> list[Contestant]:
    if data.unusable.get("nvidia-dali-cuda120", "unknown"):
        return []
    arguments = {"root": str(root), "num": num, "batch": batch, "threads": data.workers, "crop": 224}
    return [Contestant("DALI, CPU", "peer_dali.py", "loader", arguments, venv="peers", target=target, whole=False)]


def photos_q90(data: Data) -> list[Contestant]:
    batch, workers = 64, data.workers
    raw = data.photos(data.count(4864, batch))
    root = data.pack(raw, "folder", "--image", "jpg", "--quality", "90")
    files = data.unpacked(root)
    found = [
        *_both(root, batch, workers, "crop224"),
        _bare_crop(root, batch, workers, 1.3),
        _data_loader(f"cv2 on the same files, {_workers(workers)}", "files_crop", 1.7, root=str(files), batch=batch, workers=workers),
        _webdataset(root, batch, workers, None, crop=224),
    ]
    if beton := data.ffcv(raw, "jpg"):
        found.append(_ffcv("FFCV, jpg 90", beton, batch, workers, 1.6, crop=224))
    return found


def photos_256(data: Data) -> list[Contestant]:
    batch, workers = 64, data.workers
    raw = data.photos(data.count(4864, batch))
    root = data.pack(raw, "folder", "--resize", "256", "--mode", "long", "--image", "jpg", "--quality", "90")
    found = [
        *_both(root, batch, workers, "crop224"),
        _bare_crop(root, batch, workers, None),
        _webdataset(root, batch, workers, 2.0, crop=224),
    ]
    if beton := data.ffcv(raw, "jpg", 256):
        found.append(_ffcv("FFCV, jpg 90, max_resolution 256", beton, batch, workers, 1.35, crop=224))
    return found


def _weld_files(raw: Path, batch: int, workers: int, target: float, side: int) -> Contestant:
    name = f"JPEG, XML, resize to {side}, {_workers(workers)}"
    return _data_loader(name, "voc_letterbox", target, root=str(raw), batch=batch, workers=workers, side=side)


def welding_tar(data: Data) -> list[Contestant]:
    batch, workers = 32, data.workers
    raw = data.welding(data.count(640, batch), "1600x1200")
    root = data.pack(raw, "voc", "--resize", "640", "--mode", "letterbox")
    arguments = {"root": str(root), "batch": batch, "threads": workers, "side": 640}
    return [
        _ours(root, "tar", batch, workers, boxes=True),
        _weld_files(raw, batch, workers, 6.0, 640),
        _ceiling(f"simplejpeg alone, {workers} threads", "decode_only", arguments, None, exact=False),
    ]


def welding_memmap(data: Data) -> list[Contestant]:
    batch, workers = 32, data.workers
    raw = data.welding(data.count(640, batch), "1600x1200")
    root = data.pack(raw, "voc", "--format", "memmap", "--resize", "640", "--mode", "letterbox")
    return [
        _ours(root, "memmap", batch, workers, boxes=True),
        _weld_files(raw, batch, workers, 25.0, 640),
        _ceiling("np.copyto of the batch's bytes, 1 thread", "copyto", {"root": str(root), "batch": batch}, None),
    ]


def _picture_bytes(root: Path) -> float:
    """Mean size of the stored pictures."""
    return float(open_index(root, read_manifest(root), "train").samples["image_size"].mean())


def crops_of_large(data: Data) -> list[Contestant]:
    batch, workers = 16, data.workers
    raw = data.welding(data.count(192, batch), "4000x3000", 90)
    root = data.pack(raw, "voc", "--image", "jpg", "--quality", "90")
    ours, threads = _both(root, batch, workers, "crop640", boxes=True)
    arguments: dict[str, Any] = {"root": str(raw), "batch": batch, "workers": workers, "side": 640}
    return [
        replace(ours, picture_bytes=_picture_bytes(root), read_target=0.08),
        threads,
        _data_loader(f"JPEG, XML, crop 640, {_workers(workers)}", "voc_crop", 15.0, **arguments),
    ]


def letterbox_large(data: Data) -> list[Contestant]:
    batch, workers = 16, data.workers
    raw = data.welding(data.count(320, batch), "3000x2000", 95)
    root = data.pack(raw, "voc")
    found = _both(root, batch, workers, "letterbox640", boxes=True)
    for area, target in ((False, 1.4), (True, 2.0)):
        name = f"JPEG, XML, cv2 {'INTER_AREA' if area else 'INTER_LINEAR'}, {_workers(workers)}"
        arguments: dict[str, Any] = {"root": str(raw), "batch": batch, "workers": workers, "side": 640, "area": area}
        found.append(_data_loader(name, "voc_letterbox", target, **arguments))
    arguments = {"root": str(root), "batch": batch, "threads": workers, "side": 640}
    return [*found, _ceiling(f"cv2 decode and resize, {workers} threads", "decode_and_letterbox", arguments, None)]


WORKLOADS: dict[str, Workload] = {
    "memmap224": Workload("memmap 224x224, batch 256, shuffled", memmap224),
    "memmap32": Workload("memmap 32x32 (CIFAR), batch 512, with labels", memmap32),
    "tar32": Workload("tar of JPEGs 32x32 (CIFAR), batch 512", tar32),
    "photos-original": Workload("tar of original ImageNet JPEGs, RandomResizedCrop 224 and flip, batch 64", photos_original),
    "photos-lossless": Workload(
        "the same JPEGs packed with --restart-grid lossless (the same pixels), RandomResizedCrop 224 and flip, batch 64", photos_lossless
    ),
    "photos-q90": Workload("tar packed with --image jpg --quality 90, RandomResizedCrop 224 and flip, batch 64", photos_q90),
    "photos-256": Workload("tar packed at long side 256, quality 90, RandomResizedCrop 224 and flip, batch 64", photos_256),
    "welding-tar": Workload("detection 1600x1200, packed at 640 letterbox to tar, batch 32", welding_tar),
    "welding-memmap": Workload("detection 1600x1200, packed at 640 letterbox to memmap, batch 32", welding_memmap),
    "crops-large": Workload("tar of 4000x3000 JPEGs, random 640x640 crops with boxes, batch 16", crops_of_large),
    "letterbox-large": Workload("tar of 3000x2000 JPEGs, letterbox 640 while loading, batch 16", letterbox_large),
}
