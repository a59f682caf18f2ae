"""Rank 0's host, as OpenMPI itself knows it: three calls of PMIx, the service by which its daemons talk to ranks.

OpenMPI 5 tells a rank its number, and not where rank 0 is. The daemon on each host knows, and any process that it
started may ask it (openpmix.org): milliseconds, and no MPI_Init, which would make an exit wait for peers. What others
do instead, mpi4py or a part of some URI in the environment, makes ranks that fail hang, or names the host of `mpirun`,
which may be another.
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
    """pmix_value_t, of a string; the union's other members are no longer than `rest`."""

    _fields_ = (("type", ctypes.c_uint16), ("string", ctypes.c_char_p), ("rest", ctypes.c_uint64 * 4))


_PMIX_HOSTNAME = b"pmix.hname"
_PMIX_STRING = 3


def host_of_rank_0(environ: Mapping[str, str]) -> str | None:
    """Ask the PMIx server of this host; None where there is none. All ranks of a job ask, or none: the server takes a
    rank for failed that does not while others do.
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
    """Load the client library that belongs to the launcher, else the system's; versions understand each other."""
    of_mpi = environ.get("OMPI_LIBDIR_LOC", "")
    for folder in (f"{of_mpi}/openmpi/", f"{of_mpi}/", f"{environ.get('PMIX_PREFIX', '')}/lib/", ""):
        with contextlib.suppress(OSError):
            return ctypes.CDLL(f"{folder}libpmix.so.2", mode=os.RTLD_LOCAL)
    return None
