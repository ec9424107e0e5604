#!/usr/bin/env bash
# Starts a training run on every host, in the background; it survives the end of this shell.
#   launch.sh --zone ZONE [--name NAME] [--slices N] [--dir DIR] [--dry-run] -- CONFIG KEY=VALUE ...
# Set run.dir, here or in [run] of CONFIG, to a directory that all hosts see, on a shared disk or a
# mounted bucket. On a host where the run is still alive, as while it saves after stop.sh, nothing is
# started, and the exit code is 2.
# A process that is interrupted or dies is started again and resumes from the newest checkpoint (see
# resume.sh); after stop.sh, the same command resumes. With --local N, N processes on this
# machine act as hosts, for tests.

. "$(dirname "$0")/common.sh"
parse "$@"
[ ${#REST[@]} -gt 0 ] || fail "nothing to run; write -- CONFIG KEY=VALUE ... at the end"
check_config "${REST[@]}"
need_run_dir "${REST[@]}"
if [ -n "$LOCAL" ]; then
  # The coordinator is process 0 on this machine; hosts of a TPU ask the cluster instead.
  jrl=${JRL:-jrl}
  resume=$(printf %q "$(cd "$(dirname "$0")" && pwd)/resume.sh")
  who="JAX_COORDINATOR_ADDRESS=127.0.0.1:${PORT:-8476} JAX_NUM_PROCESSES=$LOCAL"
  who+=" JAX_PROCESS_ID=\$JRL_HOST"
else
  jrl="\$HOME/$DIR/.venv/bin/jrl"
  resume="\$HOME/$DIR/tpu_scripts/resume.sh"
  who="JRL_DISTRIBUTED=auto"
  run_in="cd \$HOME/$DIR || exit; "
fi
line=$(printf '%q ' "${REST[@]}")
alive='if [ -f train.pid ] && kill -0 "$(cat train.pid)" 2>/dev/null; then'
alive+=' echo "launch.sh: the run is still alive, process $(cat train.pid); wait until status.sh says not'
alive+=' running (if that process is another, delete train.pid)" >&2; exit 2; fi; '
on_hosts "${run_in:-}$alive$who nohup $resume $jrl train ${line% } > train.log 2>&1 < /dev/null & \
echo \$! > train.pid"
