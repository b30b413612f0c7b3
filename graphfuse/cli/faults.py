"""The checks of ``graphfuse doctor``. Each function yields findings, with the command that repairs them."""

import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from graphfuse.base.device import Device
from graphfuse.base.errors import CompilerNotFoundError, GraphfuseError, PluginError, SettingError, ToolkitNotFoundError
from graphfuse.base.wording import counted
from graphfuse.cli.cache_kinds import CacheKind, kinds
from graphfuse.files.cache_file import foreign

FAULT = "fault"
NOTE = "note"
OK = "ok"

_LEAST_ROOM = 32 << 20  # bytes that must be free in a cache's file system for compilations
_DRIVER_NODE = Path("/dev/nvidiactl")


@dataclass(frozen=True)
class DoctorFinding:
    """Result of a check. level: OK; NOTE if something is missing that is not needed here; FAULT. mend: the command that
    repairs it, "" if there is none."""

    check: str
    level: str
    what: str
    mend: str = ""


def settings() -> Iterator[DoctorFinding]:
    """Findings on environment variables."""
    from graphfuse.base import settings as read
    from graphfuse.base.errors import DeviceError
    from graphfuse.runtime import device

    checks: Mapping[str, Callable[[], object]] = {
        "GRAPHFUSE_DEVICE": device.get,
        "GRAPHFUSE_CACHE_DIR": read.cache_dir,
        "GRAPHFUSE_CACHE_LIMIT": lambda: read.cache_limit(1),
        "GRAPHFUSE_CUDNN": read.cudnn,
        "GRAPHFUSE_PLUGINS": read.plugins,
        "GRAPHFUSE_RANKS_TIMEOUT": read.ranks_timeout,
        "GRAPHFUSE_TUNING_DIR": read.tuning_dir,
        "GRAPHFUSE_VERIFY": read.verify,
    }
    wrong = False
    for name, check in checks.items():
        try:
            check()
        except (SettingError, DeviceError) as error:
            wrong = True
            yield DoctorFinding("settings", FAULT, str(error), f"unset {name}")
        except OSError:  # no home directory: checked by `caches`
            continue
    if not wrong:
        given = ", ".join(f"{name}={value}" for name, value in read.given().items())
        yield DoctorFinding("settings", OK, given or "none is set")


def torch() -> Iterator[DoctorFinding]:
    """Findings on torch: whether it is installed, and sees the GPU that the driver reports."""
    from graphfuse.runtime import device

    try:
        import torch
    except (ImportError, OSError) as error:
        yield DoctorFinding("torch", FAULT, f"torch cannot be imported: {error}", "pip install --force-reinstall torch")
        return
    if device.count() and not torch.cuda.is_available():
        why = "is built without CUDA" if torch.version.cuda is None else "sees no CUDA device"
        yield DoctorFinding(
            "torch",
            FAULT,
            f"torch {torch.__version__} {why}, though the driver reports {device.count()}: tensors cannot be there",
            "pip uninstall --yes torch && pip install torch",
        )
        return
    yield DoctorFinding("torch", OK, f"{torch.__version__}, {'with' if torch.version.cuda else 'without'} CUDA")


def driver() -> Iterator[DoctorFinding]:
    """Findings on devices: whether present GPUs can be used."""
    from graphfuse.runtime import device

    if device.count():
        for number in range(device.count()):
            found = device.get(number)
            yield DoctorFinding("device", OK, f"{found} {found.name}, {found.arch}")
    elif _DRIVER_NODE.exists():
        what = f"there is {_DRIVER_NODE}, but the CUDA driver reports no device"
        yield DoctorFinding("device", FAULT, what, "nvidia-smi")
    else:
        what = "no CUDA device: graphs run on the reference engine, or with GRAPHFUSE_DEVICE=emulator on the emulator"
        yield DoctorFinding("device", NOTE, what)


def nvrtc() -> Iterator[DoctorFinding]:
    """Findings on NVRTC: whether it can compile kernels for the present GPUs."""
    from graphfuse.runtime import device, toolkit

    devices = [device.get(number) for number in range(device.count())]
    try:
        kit = toolkit.load()
    except ToolkitNotFoundError as error:
        level = FAULT if devices else NOTE
        needed = "" if devices else "; it is needed for GPUs, and to compile for them ahead of time"
        yield DoctorFinding("NVRTC", level, str(error).splitlines()[0] + needed, toolkit.mend())
        return
    served = device.driver_version() if devices else None
    for found in nvrtc_serves(kit.version, toolkit.architectures(), served, devices):
        yield replace(found, what=f"{found.what}: {kit.nvrtc} ({kit.origin})")


def nvrtc_serves(
    version: str, architectures: frozenset[int], driver: int | None, devices: Sequence[Device]
) -> Iterator[DoctorFinding]:
    """Findings on NVRTC's support of devices. version: of NVRTC. architectures: that it compiles for, 90 for SM90.
    driver: the CUDA version that it supports, such as 13000; None without a driver."""
    for found in devices:
        if found.sm not in architectures:
            what = f"NVRTC {version} does not compile for {found.name} (SM{found.sm}); it does for SM"
            what += ", SM".join(map(str, sorted(architectures)))
            yield DoctorFinding("NVRTC", FAULT, what, 'pip install --upgrade "nvidia-cuda-nvrtc>=13"')
            return
    major = int(version.partition(".")[0] or 0)
    if driver is not None and driver // 1000 < major:
        served = f"{driver // 1000}.{driver % 1000 // 10}"
        what = f"the driver serves CUDA {served}, NVRTC is of CUDA {version}: its kernels cannot be loaded"
        yield DoctorFinding("NVRTC", FAULT, what, "apt-get install --only-upgrade nvidia-driver")
        return
    yield DoctorFinding("NVRTC", OK, f"{version}, for SM{min(architectures)} to SM{max(architectures)}")


def compiler() -> Iterator[DoctorFinding]:
    """Findings on the emulator's C++ compiler: whether it exists and builds libraries."""
    from graphfuse.emulator import compiler as host
    from graphfuse.runtime import device

    level = NOTE if device.count() else FAULT
    mend = "apt-get install g++"
    try:
        found = host.find()
    except CompilerNotFoundError as error:
        yield DoctorFinding("C++ compiler", level, str(error), mend)
        return
    with tempfile.TemporaryDirectory(prefix="graphfuse-") as folder:
        command = [found.path, "-std=c++17", "-fPIC", "-shared", "-x", "c++", "-", "-o", str(Path(folder, "made.so"))]
        text = "#include <cmath>\n#include <atomic>\nint made(double x) { return std::isnan(x); }\n"
        done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        log = (done.stderr.strip().splitlines() or ["no reason given"])[0]
        yield DoctorFinding("C++ compiler", level, f"{found} makes no library of C++17: {log}", mend)
    else:
        yield DoctorFinding("C++ compiler", OK, f"{found}: {found.path}")


def caches() -> Iterator[DoctorFinding]:
    """Findings on caches: whether kernels and tuned knobs can be stored, and the stored files are valid."""
    from graphfuse.base import settings as read

    for kind in kinds().values():
        variable = "GRAPHFUSE_TUNING_DIR" if kind.lasting else "GRAPHFUSE_CACHE_DIR"
        try:
            folder = kind.folder()
        except SettingError:  # reported by `settings`
            continue
        except OSError as error:
            what = f"{kind.holds} are not kept: {error}"
            yield DoctorFinding(kind.name, FAULT, what, f"export {variable}=/var/tmp/graphfuse")
            continue
        # A folder that the user's own setting names may have another use.
        faults = list(_folder(kind, folder, f"unset {variable}" if variable in read.given() else ""))
        if not faults and (bad := kind.damaged(kind.files())):
            (path, why), more = bad[0], f", and {len(bad) - 1} more" if len(bad) > 1 else ""
            faults = [(f"{path}: {why}{more}", f"graphfuse cache verify --remove {kind.name}")]
        yield from (DoctorFinding(kind.name, FAULT, *fault) for fault in faults)
        if not faults:
            yield DoctorFinding(kind.name, OK, f"{folder}, {counted(len(kind.files()), 'file')}")


def _folder(kind: CacheKind, folder: Path, unset: str) -> Iterator[tuple[str, str]]:
    """Pairs of a fault of the folder and the command that repairs it."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    quoted = shlex.quote(str(there))
    if not there.is_dir():
        yield f"{there} is no folder: {kind.holds} are not kept", unset or f"rm {quoted}"
        return
    why = foreign(there.stat()) if there == folder else None
    if why is not None:
        yield (
            f"{there}: {why}",
            f"sudo chown -R {os.geteuid()} {quoted}" if "belongs" in why else f"chmod -R go-w {quoted}",
        )
    try:
        os.scandir(there).close()
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        what = f"{there} cannot be read and written ({error.strerror}): {kind.holds} are not kept"
        yield what, unset or f"chmod u+rwx {quoted}"
        return
    if shutil.disk_usage(there).free < _LEAST_ROOM:
        yield f"the file system of {there} is full", "graphfuse cache clear"


def tables() -> Iterator[DoctorFinding]:
    """Findings on the engines' own tables of tuned knobs: whether they can be read."""
    from graphfuse import engines
    from graphfuse.base.device import ARCHES, for_arch
    from graphfuse.tuned_tables import store

    count = 0
    for engine in engines.ALL:
        for arch in ARCHES:
            try:
                count += len(store.first_party(engine, for_arch(arch)))
            except PluginError as error:
                yield DoctorFinding("tables", FAULT, str(error), "pip install --force-reinstall --no-deps graphfuse")
                return
    yield DoctorFinding("tables", OK, f"{count} tuned entries come with the engines")


def installed() -> Iterator[DoctorFinding]:
    """Findings on plug-ins: whether patterns and engines of installed packages can be used, also together."""
    from graphfuse.planning import registry as plugins

    found = plugins.listed()
    for one in found:
        if one.state == plugins.LEFT_OUT:
            yield DoctorFinding("plug-ins", FAULT, str(one.error), f"pip uninstall --yes {one.distribution}")
    sound = [one for one in found if one.state != plugins.LEFT_OUT]
    if sound or not found:
        names = ", ".join(dict.fromkeys(f"{one.distribution} {one.version}" for one in sound))
        yield DoctorFinding("plug-ins", OK, names or "none is installed")


CHECKS: tuple[Callable[[], Iterator[DoctorFinding]], ...] = (
    settings,
    driver,
    torch,
    nvrtc,
    compiler,
    caches,
    tables,
    installed,
)


def findings() -> Iterator[DoctorFinding]:
    """Findings of all checks. An exception of a check is a finding, too, and the other checks still run."""
    for check in CHECKS:
        try:
            yield from check()
        except (GraphfuseError, OSError) as error:
            yield DoctorFinding(check.__name__, FAULT, f"{type(error).__name__}: {error}", "graphfuse info")
