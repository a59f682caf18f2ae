#!/usr/bin/env bash
# Training over torchrun, or any launcher, called as LiBai's script is: bash tools/train.sh FILE CONFIG GPUS [key=value ...]
set -euo pipefail

usage() {
    cat >&2 <<'TEXT'
usage: bash tools/train.sh FILE CONFIG GPUS [key=value ...]

  FILE        the training program: train.py
  CONFIG      the config: configs/gpt_3d.py
  GPUS        ranks on this host, at least 1
  key=value   overrides of the config's keys, and flags of FILE (--resume, ...)

FILE and CONFIG are looked for from here, then from the repository. Environment:

  NODE        number of hosts (1)                   NODE_RANK   number of this one, from 0 (0)
  ADDR        where host 0 is found                 PORT        where the ranks meet there (12345)

NNODES, MASTER_ADDR and MASTER_PORT, torchrun's names of these, stand in for NODE, ADDR and PORT.

  LAUNCHER    torchrun (default), or another of dslpar launch, which then checks and starts
              train.py: deepspeed, openmpi, mpich, slurm; hosts are those of HOSTFILE

On one host, without PORT, a free port is taken. On several, run the same line on each, with its NODE_RANK, and ADDR.
TEXT
    echo "train.sh: $1" >&2
    exit 2
}

# The path of a file that is named from here, or from the repository.
find_file() {
    local path
    for path in "$2" "$repository/$2"; do
        if [[ -f $path ]]; then
            printf '%s\n' "$path"
            return
        fi
    done
    usage "there is no $1 $2"
}

check_number() {
    [[ $2 =~ ^(0|[1-9][0-9]*)$ && ${#2} -le 6 && $2 -ge $3 ]] || usage "$1 is '$2'; it is a whole number, at least $3"
}

(($# >= 3)) || usage "$# of 3 arguments"
repository=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
check_number GPUS "$3" 1
program=$(find_file FILE "$1")
config=$(find_file CONFIG "$2")
gpus=$3
shift 3

if [[ ${LAUNCHER:-torchrun} != torchrun ]]; then
    [[ $program -ef $repository/train.py || $program -ef $repository/tools/train_net.py ]] ||
        usage "LAUNCHER=$LAUNCHER starts train.py, not $program: start that by the launcher's own command"
    [[ -z ${NODE:-${NNODES:-}}${NODE_RANK:-} ]] || usage "of LAUNCHER=$LAUNCHER HOSTFILE says the hosts, not NODE"
    where=(--world-size "$gpus")
    [[ -z ${HOSTFILE:-} ]] || where=(--hostfile "$HOSTFILE")
    [[ -z ${PORT:-} ]] || where+=(--master-port "$PORT")
    python=python
    [[ ! -x $repository/.venv/bin/python ]] || python=$repository/.venv/bin/python
    export PYTHONPATH=$repository${PYTHONPATH:+:$PYTHONPATH}
    exec "$python" -m dslpar launch "$config" --launcher "$LAUNCHER" "${where[@]}" "$@"
fi

NODE=${NODE:-${NNODES:-}} ADDR=${ADDR:-${MASTER_ADDR:-}} PORT=${PORT:-${MASTER_PORT:-}}
nodes=${NODE:-1}
node_rank=${NODE_RANK:-0}
check_number NODE "$nodes" 1
check_number NODE_RANK "$node_rank" 0
((node_rank < nodes)) || usage "NODE_RANK is $node_rank; of $nodes hosts the last is $((nodes - 1))"
((nodes == 1)) || [[ -n ${ADDR:-} ]] || usage "of $nodes hosts each needs ADDR, the name or address of host 0"
check_number PORT "${PORT:-12345}" 1
((${PORT:-12345} <= 65535)) || usage "PORT is $PORT; the last is 65535"

if ((nodes == 1)) && [[ -z ${PORT:-} ]]; then
    meeting=(--standalone)
else
    meeting=(--nnodes "$nodes" --node_rank "$node_rank"
        --master_addr "${ADDR:-127.0.0.1}" --master_port "${PORT:-12345}")
fi

if [[ -x $repository/.venv/bin/torchrun ]] && ! command -v torchrun >/dev/null; then
    PATH=$repository/.venv/bin:$PATH
fi
command -v torchrun >/dev/null || usage "there is no torchrun in PATH; it comes with torch"

exec torchrun --nproc_per_node "$gpus" "${meeting[@]}" "$program" --config "$config" "$@"
