"""Pages of what `dslpar launch` (dslpar/launch) finds before it starts a job on several hosts."""

from __future__ import annotations

from dslpar.linter.catalog.page import RunTimePage

PAGES = (
    RunTimePage(
        "HST211",
        "unreachable-host",
        """
A host of the job does not answer over ssh.

What it does:
    Opens ssh to every host at once, with BatchMode, and tells apart what fails: the name, the network, sshd, the key.

Why:
    Launchers wait for it, or ask for a password that nobody types, and the ranks of the other hosts wait with them.

Use instead:
    ssh-copy-id node2  # then `ssh node2 true` asks nothing
""",
    ),
    RunTimePage(
        "HST212",
        "other-versions",
        """
A host has another Python, torch, DeepSpeed or dslpar, or none.

What it does:
    Runs this Python, by its path, on every host, and compares versions, and of dslpar a digest of its sources.

Why:
    Ranks of different versions fail late, or train nonsense.

Use instead:
    rsync -a .venv/ node2:$PWD/.venv/  # or a file system that all hosts share
""",
    ),
    RunTimePage(
        "HST213",
        "config-differs-there",
        """
A host has another config, or not this folder.

What it does:
    Compares a digest of the config, and of every file that it imports, by their paths.

Why:
    Each rank reads its own copy: ranks would train different models.

Use instead:
    rsync -a configs/ node2:$PWD/configs/  # or a file system that all hosts share
""",
    ),
    RunTimePage(
        "HST214",
        "output-not-shared",
        """
A host does not see, or may not write to, the output folder.

What it does:
    Writes a file beside what is to be the output, looks for it on every host, and removes it.

Why:
    Every host writes its part of a checkpoint; parts that lie on different disks are no checkpoint.

Use instead:
    dslpar launch CFG --hostfile FILE train.output_dir=/shared/run1
""",
    ),
    RunTimePage(
        "HST215",
        "clocks-differ",
        """
A host's clock is off by seconds.

What it does:
    Compares each clock with this host's, less the time that the visit took; 2 s are let pass.

Why:
    Logs of several hosts are read side by side, and tools compare times of files.

Use instead:
    timedatectl set-ntp true
""",
        "warning",
    ),
    RunTimePage(
        "HST216",
        "port-taken",
        """
The port that was asked for is taken on the first host.

What it does:
    Tries to listen there.

Why:
    Rank 0 listens at that port; ranks would meet those of another job, or fail.

Use instead:
    dslpar launch CFG --hostfile FILE  # finds a free port
""",
    ),
    RunTimePage(
        "HST217",
        "no-interface",
        """
A host meets the others by no interface that they could reach.

What it does:
    Asks each host's kernel by which interface packets to the first host leave.

Why:
    gloo would tell the others 127.0.0.1, and they would not find it.

Use instead:
    GLOO_SOCKET_IFNAME=eth0 dslpar launch CFG --hostfile FILE
""",
        "warning",
    ),
    RunTimePage(
        "HST218",
        "bad-deepspeed-env",
        """
A line of .deepspeed_env is not NAME=value.

What it does:
    Reads the .deepspeed_env files that DeepSpeed reads, at home and in this folder.

Why:
    DeepSpeed stops at such a line with a ValueError. (Comments and blank lines dslpar leaves out.)

Use instead:
    NCCL_DEBUG=INFO
""",
    ),
    RunTimePage(
        "HST219",
        "choice-of-accelerators",
        """
The accelerators that --include or --exclude leaves cannot be handed to this launcher.

What it does:
    Checks that mpirun, whose one command line is for all hosts, is to use the same accelerators on each; and that none
    are chosen under Slurm, which gives them out itself.

Why:
    Ranks would use other accelerators than were chosen.

Use instead:
    dslpar launch CFG --hostfile FILE --include node1:0,1@node2:2,3 --launcher deepspeed
""",
    ),
    RunTimePage(
        "HST220",
        "not-by-host",
        """
--no-ssh with a launcher that cannot start hosts one by one, or for a host that there is not.

What it does:
    Checks --no-ssh against the launcher, and --node-rank against the number of hosts.

Why:
    mpirun and srun start all hosts from one.

Use instead:
    dslpar launch CFG --hostfile FILE --no-ssh --node-rank 1 --launcher torchrun
""",
    ),
    RunTimePage(
        "HST222",
        "path-not-for-pdsh",
        """
This folder, or this Python, has a path that DeepSpeed's launcher cannot hand to other hosts.

What it does:
    Looks for spaces, quotes and whatever else a shell or pdsh (%h, %n, %u, %%) reads as something else.

Why:
    DeepSpeed has pdsh run `cd FOLDER; PYTHON ...` on each host and quotes neither: ranks would stand in another folder,
    where a relative path is another file, or not start. The config's path and overrides may hold anything: dslpar
    quotes those.

Use instead:
    dslpar launch CFG --hostfile FILE --launcher torchrun
""",
    ),
    RunTimePage(
        "HST223",
        "unused-allocation",
        """
This is a job of Slurm or PBS, and all ranks start on one host.

What it does:
    Looks for SLURM_JOB_NODELIST and PBS_NODEFILE where no --hostfile is given. An allocation of this one host is no
    matter, and --launcher slurm takes its job's hosts by itself.

Why:
    Nothing is taken from an allocation unless asked for: the other hosts would stand idle.

Use instead:
    dslpar launch CFG --hostfile slurm  # or pbs
""",
        "info",
    ),
    RunTimePage(
        "HST224",
        "cannot-meet",
        """
A host cannot connect to the first one, where rank 0 will listen.

What it does:
    Has the first host listen at rank 0's port for a moment, and every other one connect to it, by the name that ranks
    will use. This comes last, where all else is well.

Why:
    ssh gets through where other ports are closed, and a name that is known here may be unknown there; ranks would wait
    for rank 0 until a time-out of many minutes.

Use instead:
    dslpar launch CFG --hostfile FILE --master-port 29500  # a port that the firewall leaves open
""",
    ),
    RunTimePage(
        "HST225",
        "idle-accelerators",
        """
A scheduler's allocation has fewer ranks for this host than it has accelerators.

What it does:
    Compares SLURM_TASKS_PER_NODE, or the lines of PBS's file, with the accelerators of this host, if it is one of them.

Why:
    Unless asked for more, Slurm and PBS give a host one task; a rank drives one accelerator, and the others are idle.

Use instead:
    sbatch --nodes 2 --ntasks-per-node 8 --gpus-per-node 8 job.sh
""",
        "warning",
    ),
    RunTimePage(
        "HST226",
        "one-machine-twice",
        """
Two hosts of the hostfile are this machine.

What it does:
    Looks which names and addresses are this machine's own.

Why:
    It would start the ranks of one of them, and fewer than the world has.

Use instead:
    node1 slots=8
""",
    ),
    RunTimePage(
        "HST227",
        "colons-in-an-address",
        """
An IPv6 address, for a launcher that reads its colons as something else.

What it does:
    Looks for colons in names, under deepspeed (pdsh: TYPE:HOST), openmpi and mpich (HOST:RANKS), and slurm.

Why:
    They would look for a host of another name.

Use instead:
    dslpar launch CFG --hostfile FILE --launcher torchrun
""",
    ),
    RunTimePage(
        "HST228",
        "launched-twice",
        """
`dslpar launch` runs as one of several processes of another launcher.

What it does:
    Looks for the variables by which torchrun, mpirun and srun tell a process its rank, where there are several.
    --no-ssh, which starts one host's ranks, may be run so, once a host.

Why:
    `srun dslpar launch` starts the whole job once a task: jobs that take each other's ports and output folder.

Use instead:
    dslpar launch CFG --launcher slurm  # in the batch script, without srun
""",
    ),
)
