"""Pages of what ranks find as they meet: places, launchers, devices, and that all are given the same."""

from __future__ import annotations

from dslpar.linter.catalog.page import RunTimePage

PAGES = (
    RunTimePage(
        "HST201",
        "half-a-place",
        """
The environment says a part of where this process stands, and not the rest.

What it does:
    Checks that RANK and LOCAL_RANK are set where WORLD_SIZE is over 1, and the same of OpenMPI's, MPICH's and Slurm's
    own variables.

Why:
    Ranks that guess would guess alike, and wait for each other.

Use instead:
    torchrun --nproc_per_node 8 train.py --config FILE  # a launcher sets all of them
""",
    ),
    RunTimePage(
        "HST202",
        "no-meeting-place",
        """
Ranks on several hosts, and no address of rank 0.

What it does:
    Asks for MASTER_ADDR where nobody knows it. deepspeed and torchrun give it, srun's list of nodes begins with it, and
    OpenMPI 5 is asked for rank 0's host, whose name every host must know. MPICH says nothing, nor does srun with
    --distribution=arbitrary.

Why:
    The hosts could not find each other.

Use instead:
    mpirun -x MASTER_ADDR=node1 ... train.py --config FILE
""",
    ),
    RunTimePage(
        "HST203",
        "ranks-differ",
        """
A rank has another config, another text, another number of samples or other versions than rank 0.

What it does:
    Compares them over all ranks when the processes have met, before anything is built or written.

Why:
    Ranks that differ train nonsense, or wait for each other for ever. A config that was not copied to one host is
    enough, or another Python, whose standard library is another text.

Use instead:
    deepspeed --hostfile FILE train.py --config FILE  # the same files and packages on every host
""",
    ),
    RunTimePage(
        "HST204",
        "launcher-not-installed",
        """
The launcher's program is not on this host.

What it does:
    Looks for deepspeed, mpirun, srun or torchrun beside this Python, then in PATH.

Why:
    Nothing would start.

Use instead:
    dslpar launch CFG --launcher torchrun  # comes with torch
""",
    ),
    RunTimePage(
        "HST205",
        "mpi-of-another-kind",
        """
The mpirun of this host is not of the MPI that was asked for.

What it does:
    Asks `mpirun --version` whose it is.

Why:
    OpenMPI and MPICH take different flags, and ignore or misread each other's.

Use instead:
    dslpar launch CFG --launcher openmpi
""",
    ),
    RunTimePage(
        "HST206",
        "too-few-accelerators",
        """
More ranks on this host than it has accelerators.

What it does:
    Compares the ranks of this host with its NVIDIA devices, or those that CUDA_VISIBLE_DEVICES leaves.

Why:
    Two ranks would share a device, or wait for one that is not there.

Use instead:
    dslpar launch CFG --world-size 4  # or DS_ACCELERATOR=cpu
""",
    ),
    RunTimePage(
        "HST207",
        "localhost-among-hosts",
        """
A hostfile with several hosts, and one of them is localhost.

What it does:
    Checks the names of the hosts where there is more than one.

Why:
    localhost is another machine on each host: the ranks could not meet.

Use instead:
    node1 slots=8
""",
    ),
    RunTimePage(
        "HST208",
        "devices-by-name",
        """
CUDA_VISIBLE_DEVICES names devices by their UUID, and the launcher is DeepSpeed's.

What it does:
    Checks that the visible devices are numbers.

Why:
    DeepSpeed's launcher takes numbers, and would give its ranks the first devices instead.

Use instead:
    CUDA_VISIBLE_DEVICES=2,3 dslpar launch CFG
""",
    ),
    RunTimePage(
        "HST221",
        "weights-differ",
        """
Ranks have built the same modules with other weights.

What it does:
    Compares sums of the weights of an nn.Sequential, which every rank of a pipeline builds whole.

Why:
    Each stage comes from another rank: the model would be none that a seed gives.

Use instead:
    torch.manual_seed(0)  # before the model is built, on every rank
""",
    ),
)
