"""Which I/O engine moves a tier's blocks to and from host memory, and whether blocks may go between
device and disk without passing there."""

from __future__ import annotations

from pathlib import Path

from tiered_kv.errors import UnsupportedError
from tiered_kv.values import PAGE_BYTES
from tiered_kv_nvme.faults import OUT_OF_SPACE
from tiered_kv_nvme.groups import GroupIo
from tiered_kv_nvme.kvikio_io import (
    Kvikio,
    KvikioFiles,
    KvikioIo,
    Span,
    gds_missing,
    probe,
    start,
)
from tiered_kv_nvme.plan import address_of, anonymous
from tiered_kv_nvme.posix import PosixIo
from tiered_kv_nvme.settings import NvmeSettings
from tiered_kv_nvme.stripes import Stripes

__all__ = ["direct_missing", "direct_mode", "engine_for", "kvikio_for_gpu"]


def engine_for(
    settings: NvmeSettings, stripes: Stripes, files: KvikioFiles, *, moves_blocks: bool
) -> GroupIo:
    """The engine that the settings ask for. `moves_blocks` is False where only the index is read.

    Raises:
        UnsupportedError: KvikIO is asked for and cannot work here; the text says why.
    """
    posix = PosixIo(settings.io_threads, settings.name, alignment=stripes.alignment)
    if not moves_blocks:
        return posix
    if settings.gpu_direct == "on":
        _demand(settings, "gpu_direct: on")
    if settings.io != "kvikio":
        return posix
    _demand(settings, "io: kvikio")
    for place in stripes.here:
        path, mode = stripes.paths[place], stripes.mode_of(place)
        if not mode.direct:
            raise UnsupportedError(
                f"tier {settings.name}: `io: kvikio` needs direct I/O, but in {path} it is "
                f"{mode}; take `io: posix`"
            )
        if place in stripes.storing:
            _try(path, settings.name)
    return KvikioIo(files, posix, settings.name)


def _try(path: Path, tier: str) -> None:
    page = anonymous(PAGE_BYTES)
    try:
        probe(path, Span(address_of(page), page.nbytes, page))
    except OSError as error:
        if error.errno not in OUT_OF_SPACE:  # what is stored can be read all the same
            raise UnsupportedError(
                f"tier {tier}: KvikIO cannot write to {path}: {error.strerror}; take `io: posix`"
            ) from error


def kvikio_for_gpu(settings: NvmeSettings) -> Kvikio:
    """KvikIO, where `gpu_direct` lets blocks go between device and disk here; whether the engine's
    cache is on a device is another question.

    Raises:
        UnsupportedError: why not.
    """
    if settings.gpu_direct == "off":
        raise UnsupportedError("`gpu_direct: off`")
    missing = gds_missing() if settings.gpu_direct == "auto" else None
    if missing is None:
        kvikio = start()
        if kvikio.gds or settings.gpu_direct == "on":
            return kvikio
        missing = kvikio.compat
    raise UnsupportedError(f"GPUDirect Storage is not in effect: {missing}")


def direct_mode(settings: NvmeSettings) -> str:
    """What comes of `gpu_direct`, for those who look."""
    if settings.gpu_direct == "off":
        return "off"
    missing = direct_missing(settings)
    return f"{settings.gpu_direct}, GDS {start()}" if missing is None else f"off: {missing}"


def direct_missing(settings: NvmeSettings) -> str | None:
    """Why blocks do not go between device and disk directly; None where nothing is missing."""
    try:
        kvikio_for_gpu(settings)
    except UnsupportedError as error:
        return str(error)
    return None


def _demand(settings: NvmeSettings, wish: str) -> None:
    try:
        start()
    except UnsupportedError as error:
        raise UnsupportedError(
            f"tier {settings.name}: `{wish}` is not possible: {error}"
        ) from error
