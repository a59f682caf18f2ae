"""PMIx: ask OpenMPI for rank 0's host, with three calls to the service by which its daemons talk to ranks.

OpenMPI 5 gives a rank its number, but not rank 0's host. The daemon on each host knows rank 0's host, and any process
that the daemon has started may ask for it (openpmix.org). This takes milliseconds. It needs no MPI_Init, with which a
rank that exits would wait for its peers. The usual alternatives are worse. With mpi4py a failing rank hangs. The URI in
the environment names the host of `mpirun`, which may differ from rank 0's.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Mapping


class _Proc(ctypes.Structure):
    """pmix_proc_t."""

    _fields_ = (("nspace", ctypes.c_char * 256), ("rank", ctypes.c_uint32))


class _Value(ctypes.Structure):
    """pmix_value_t that holds a string. `rest` reserves room for the union's other members."""

    _fields_ = (("type", ctypes.c_uint16), ("string", ctypes.c_char_p), ("rest", ctypes.c_uint64 * 4))


_PMIX_HOSTNAME = b"pmix.hname"
_PMIX_STRING = 3


def host_of_rank_0(environ: Mapping[str, str]) -> str | None:
    """Ask this host's PMIx server for rank 0's host; None without a server.

    Either all ranks of a job must call this, or none: if some do, the server counts the others as failed.
    """
    library = _pmix(environ) if "PMIX_NAMESPACE" in environ else None
    me = _Proc()
    if library is None or library.PMIx_Init(ctypes.byref(me), None, ctypes.c_size_t(0)):
        return None
    found = ctypes.POINTER(_Value)()
    first = _Proc(me.nspace, 0)
    failed = library.PMIx_Get(ctypes.byref(first), _PMIX_HOSTNAME, None, ctypes.c_size_t(0), ctypes.byref(found))
    known = not failed and found.contents.type == _PMIX_STRING
    name = found.contents.string.decode() if known else None
    library.PMIx_Finalize(None, ctypes.c_size_t(0))
    return name


def _pmix(environ: Mapping[str, str]) -> ctypes.CDLL | None:
    """Load the PMIx client library of this OpenMPI, else the system's; None without one. Versions are compatible."""
    of_mpi = environ.get("OMPI_LIBDIR_LOC", "")
    for folder in (f"{of_mpi}/openmpi/", f"{of_mpi}/", f"{environ.get('PMIX_PREFIX', '')}/lib/", ""):
        with contextlib.suppress(OSError):
            return ctypes.CDLL(f"{folder}libpmix.so.2", mode=os.RTLD_LOCAL)
    return None
