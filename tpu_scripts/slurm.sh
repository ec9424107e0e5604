#!/usr/bin/env bash
# Submits a run to Slurm, for clusters of GPUs: one process a node, which sees all its GPUs.
#   slurm.sh [--name NAME] [--nodes N] [--gpus PER_NODE] [--time HH:MM:SS] [--partition P]
#            [--dry-run] -- CONFIG KEY=VALUE ...
# Run it where jrl is on the path of every node. Set run.dir, here or in [run] of CONFIG, to a directory
# that all nodes share. Slurm sends SIGTERM five minutes before the end, and the run saves a checkpoint
# there; the job is queued again and resumes from it, ten times at most. So it is when a process dies.

. "$(dirname "$0")/common.sh"
NODES=1 GPUS=8 TIME=24:00:00 PARTITION= others=()
while [ $# -gt 0 ]; do
  case $1 in
    --nodes) value_of "$@"; NODES=$2; shift ;;
    --gpus) value_of "$@"; GPUS=$2; shift ;;
    --time) value_of "$@"; TIME=$2; shift ;;
    --partition) value_of "$@"; PARTITION=$2; shift ;;
    --) others+=("$@"); break ;;
    *) others+=("$1") ;;
  esac
  shift
done
parse ${others[@]+"${others[@]}"}
[ ${#REST[@]} -gt 0 ] || fail "nothing to run; write -- CONFIG KEY=VALUE ... at the end"
whole_number --nodes "$NODES"
whole_number --gpus "${GPUS##*:}"
check_config "${REST[@]}"
need_run_dir "${REST[@]}"
line=$(printf '%q ' "${REST[@]}")
args=("--job-name=$NAME" "--nodes=$NODES" --ntasks-per-node=1 "--gpus-per-node=$GPUS")
args+=("--time=$TIME" --signal=TERM@300 --output=%x-%j.log --open-mode=append --requeue)
[ -z "$PARTITION" ] || args+=("--partition=$PARTITION")
# Codes up to 4 are final: done, a mistake, a run that stopped itself, a disk that is full.
# JAX gives each process of Slurm one GPU, unless it is told of others.
devices=$(seq -s , 0 $((${GPUS##*:} - 1)))
again='code=$?; [ $code -le 4 ] || [ ${SLURM_RESTART_COUNT:-0} -ge 10 ] ||'
again+=' scontrol requeue $SLURM_JOB_ID; exit $code'
run sbatch "${args[@]}" "--wrap=JRL_DISTRIBUTED=auto JAX_LOCAL_DEVICE_IDS=$devices srun jrl train ${line% }; $again"
